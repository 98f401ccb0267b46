"""Warden, the process beside a virtual machine: it starts the hypervisor, serves its sockets, and tells how it ended.

`vm/launch.py` runs `start.py` in an interpreter of its own; nothing else is for others.
"""
