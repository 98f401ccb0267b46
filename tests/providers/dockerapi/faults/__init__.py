"""Daemons and managers that are killed, hang or lie: what the host holds after is what the registry says."""
