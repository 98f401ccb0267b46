"""The process beside every virtual machine: it starts it, listens for it, and tells how it ended."""
