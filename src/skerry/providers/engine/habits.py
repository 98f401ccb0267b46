"""In what engines differ that speak the same API."""

from __future__ import annotations

import msgspec


class Habits(msgspec.Struct, frozen=True):
    may_be_here: bool = True
    """Whether its daemon can be one of this machine, and so see our files and processes."""
    reads_seccomp_from_file: bool = False
    tmpfs_has_owner: bool = True
    log_driver: str = "json-file"
    chooses_runtime: bool = True
    parts_bridge: bool = True
    """Boxes on its bridge can be kept from each other."""
    scratch: tuple[str, ...] = ()
    """Folders that it makes writable in a root that is not."""
    ulimits: dict[str, int] = {}
    """Limits that it must be told, since what it asks for by itself is more than a daemon may have everywhere."""
