"""Adapters: sandboxes as frameworks of agents want them, one file a framework, which is imported by nobody else."""
