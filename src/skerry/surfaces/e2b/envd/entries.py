"""Files in the words of E2B's wire."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from skerry.model.results import FileDetails, FileType

METADATA = "user.e2b."
"""The beginning of the extended attributes that are a file's metadata."""
_TYPES = {FileType.FILE: "FILE_TYPE_FILE", FileType.DIR: "FILE_TYPE_DIRECTORY"}
_LETTERS = {
    FileType.DIR: "d", FileType.SYMLINK: "L", FileType.BLOCK: "D", FileType.FIFO: "p", FileType.SOCKET: "S",
    FileType.CHAR: "Dc",
}  # fmt: skip
_BITS = ((stat.S_ISUID, "u"), (stat.S_ISGID, "g"), (stat.S_ISVTX, "t"))


def entry(file: FileDetails) -> dict[str, Any]:
    """A file as `EntryInfo`. A link has the type and the mode of what it leads to."""
    found: dict[str, Any] = {
        "name": file.name,
        "path": file.path,
        "type": _TYPES.get(file.type, "FILE_TYPE_UNSPECIFIED"),
        "size": str(file.size),
        "mode": file.mode & 0o777,
        "permissions": permissions(file),
        "owner": file.owner,
        "group": file.group,
    }
    modified = _timestamp(file.mtime)
    if modified is not None:
        found["modifiedTime"] = modified
    if file.type is FileType.SYMLINK:
        end = file.leads_to
        found["type"] = "FILE_TYPE_UNSPECIFIED" if end is None else _TYPES.get(end.type, "FILE_TYPE_UNSPECIFIED")
        found["mode"] = 0 if end is None else end.mode & 0o777
        found["symlinkTarget"] = file.path if end is None else end.path
    if known := metadata(file.xattrs):
        found["metadata"] = known
    return {name: text(value) if isinstance(value, str) else value for name, value in found.items()}


def metadata(xattrs: Mapping[str, bytes]) -> dict[str, str]:
    return {name.removeprefix(METADATA): value.decode(errors="replace") for name, value in xattrs.items()}


def permissions(file: FileDetails) -> str:
    """The type and the bits of a file as Go writes them."""
    kind = _LETTERS.get(file.type, "")
    special = "".join(letter for bit, letter in _BITS if file.mode & bit)
    if "c" in kind:  # a device of characters: the letter comes after that of the set-gid bit
        special = special.replace("t", "") + "c" + ("t" if "t" in special else "")
        kind = "D"
    letters = "".join(
        letter if file.mode >> at & 1 else "-" for at, letter in zip(range(8, -1, -1), "rwx" * 3, strict=True)
    )
    return ((kind + special) or "-") + letters


def _timestamp(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, OSError, ValueError):
        return None  # an agent may tell any time


def text(value: str) -> str:
    """A name for the wire, which knows UTF-8 alone."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
