"""The host that boxes run on: its processes, control groups and uids."""
