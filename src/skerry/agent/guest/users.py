"""Who a box's processes run as."""

from __future__ import annotations

_MAX_ID = (1 << 32) - 2


def find_user(name: str) -> tuple[int, int]:
    """The numbers of a user that is given by UID, UID:GID, or a name that the image knows."""
    uid, _, gid = name.partition(":")
    if uid.isdecimal() and (gid or uid).isdecimal() and max(int(uid), int(gid or uid)) <= _MAX_ID:
        return int(uid), int(gid or uid)
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            for line in file:
                entry = line.split(":")
                if len(entry) > 3 and entry[0] == uid:
                    return int(entry[2]), int(entry[3])
    except (OSError, ValueError):
        pass
    if uid == "root":
        return 0, 0
    raise LookupError(f"no user is called {uid!r} in the image; give a UID or UID:GID")


def set_rlimits(limits: dict[str, int]) -> None:
    """Bounds of each process of the box; none is raised above what we may have ourselves."""
    import resource

    for name, value in limits.items():
        number = getattr(resource, "RLIMIT_" + name.upper())
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
