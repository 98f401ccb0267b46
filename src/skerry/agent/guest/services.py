"""Programs of the image that run beside the box, as root, with the console for their words."""

from __future__ import annotations

import posix

from .spawn import DEFAULT_PATH, join, to_bytes

_SIGPIPE = 13


def start(argv: list[str], env: dict[str, str]) -> int:
    """Its pid. Raises OSError if there is no such program."""
    null = posix.open("/dev/null", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.posix_spawn(
            _find(argv[0], env.get("PATH") or DEFAULT_PATH),
            [to_bytes(arg) for arg in argv],
            {to_bytes(name): to_bytes(value) for name, value in env.items()},
            file_actions=[(posix.POSIX_SPAWN_DUP2, null, 0), (posix.POSIX_SPAWN_DUP2, 2, 1)],
            setsid=True,
            setsigdef=[_SIGPIPE],
        )
    finally:
        posix.close(null)


def _find(program: str, path: str) -> str:
    places = [program] if "/" in program else [join(folder, program) for folder in path.split(":")]
    return next((place for place in places if posix.access(place, posix.X_OK)), program)
