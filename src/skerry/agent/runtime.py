"""How the agent and, for a box without Python, an interpreter get into a box: read-only folders, made once."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import msgspec

from skerry.errors import ProviderError
from skerry.version import __version__

GUEST = Path(__file__).parent / "guest"


class Portable(msgspec.Struct, frozen=True):
    """A self-contained interpreter: its libraries, its loader, and the standard modules that the agent needs."""

    folder: Path
    python: str
    """The host's interpreter that it is a copy of; the agent is to be compiled for this one."""

    def argv(self, mount: str) -> list[str]:
        """The command that runs it, up to the script, where the box sees `folder` at `mount`."""
        library = f"{mount}/lib"
        return [f"{library}/ld.so", "--library-path", library, f"{mount}/bin/python3", "-I", "-S", "-B"]


def agent_folder(cache: Path, python: str) -> Path:
    """A world-readable folder with the agent (`start.py`), compiled for the interpreter `python`."""
    folder = cache / f"agent-{_key(python)}"
    if not folder.is_dir():
        from . import folders

        folders.make(folder, lambda aside: folders.fill_with_agent(aside, python))
    return folder


def portable(cache: Path) -> Portable:
    """The portable interpreter of this host: a copy of the one that runs us."""
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    folder = cache / f"python-{_key(python)}"
    if not folder.is_dir():
        from . import folders

        folders.make(folder, lambda aside: folders.fill_with_interpreter(aside, Path(python)))
    return Portable(folder, python)


def guest_sources() -> list[Path]:
    return sorted(GUEST.glob("*.py"))


def _key(python: str) -> str:
    """A name for this version, the agent's sources and an interpreter, found without running it."""
    try:
        binary = os.path.realpath(python)
        seen = os.stat(binary)
    except OSError as error:
        raise ProviderError(f"the interpreter {python!r} cannot be used: {error.strerror}") from error
    digest = hashlib.sha256(f"{__version__}\0{binary}\0{seen.st_mtime_ns}\0{seen.st_size}".encode())
    for source in guest_sources():
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]
