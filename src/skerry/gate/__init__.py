"""The gate: the one process of an installation through which sandboxes with rules reach anything at all."""
