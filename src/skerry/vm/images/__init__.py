"""Images and kernels for machines, made and kept in a cache folder without root or a daemon.

From outside: `store` (images), `kernels`, `disks` (drives beside the root) and `artifact_cache`.
"""
