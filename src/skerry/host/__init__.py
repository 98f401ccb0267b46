"""The host that boxes run on: processes, control groups, uids, locks, folders, disks and how programs are started.

Providers, machines and the manager use all of it; it knows none of them.
"""
