"""Many sandboxes, described by one file, started in phases, seen and commanded as one."""
