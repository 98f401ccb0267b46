"""Measuring: what sandboxes cost on this machine, as figures beside the least that the machine needs for the same.

`skerry bench` calls `sandboxes.measure`; `bench/` of the repository, which measures much more, shares the other files.
"""
