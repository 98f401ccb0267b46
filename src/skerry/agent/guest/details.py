"""What else is known of files: names of owners, where links lead, extended attributes; and who a user is."""

from __future__ import annotations

import binascii
import os
import stat

from . import files
from .channel import Call, Failure
from .contents import named
from .users import entries, find_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

_MOST_BYTES = 1 << 16
_PLACES = {"/etc/passwd": 7, "/etc/group": 4}


class Details:
    """More of each of many files. Users and groups are read once."""

    def __init__(self, agent: Agent, prefix: object) -> None:
        """`prefix` is that of the extended attributes to tell of, if any."""
        if prefix is not None and type(prefix) is not str:
            raise Failure("invalid", "xattrs is the beginning of names")
        self._agent = agent
        self._prefix: str | None = prefix
        self._owners, self._groups = (
            {each[2]: each[0] for each in reversed(entries(path, fields))} for path, fields in _PLACES.items()
        )

    def of(self, path: bytes, info: os.stat_result) -> dict[str, Any]:
        uid, gid = str(info.st_uid), str(info.st_gid)
        found: dict[str, Any] = {"owner": self._owners.get(uid, uid), "group": self._groups.get(gid, gid)}
        if stat.S_ISLNK(info.st_mode):
            found["leads_to"] = self._end_of(path)
        if self._prefix is not None:
            found["xattrs"] = self._xattrs(path, self._prefix)
        return found

    def _end_of(self, link: bytes) -> dict[str, Any] | None:
        try:
            end = self._agent.target_of(link)
            info = os.stat(end)
        except OSError:
            return None
        kind = files.TYPES.get(stat.S_IFMT(info.st_mode), "file")
        return {**named("path", self._agent.box_path(end)), "type": kind, "mode": stat.S_IMODE(info.st_mode)}

    def _xattrs(self, path: bytes, prefix: str) -> dict[str, str]:
        """Those of a file, as many as fit a record."""
        found = {}
        room = _MOST_BYTES
        try:
            for name in os.listxattr(path):
                if not name.startswith(prefix):
                    continue
                value = os.getxattr(path, name)
                room -= len(name) + len(value)
                if room < 0:
                    break
                name.encode("utf-8")
                found[name] = binascii.b2a_base64(value, newline=False).decode("ascii")
        except (OSError, UnicodeError):  # a file system without them, a link that leads nowhere, a name that is no text
            pass
        return found


def user(agent: Agent, call: Call) -> None:
    """Tell who a user is: the one of that name or number as the box has it, else we ourselves, with the home in which
    our commands start."""
    asked = call.params.get("user")
    name = str(os.geteuid()) if asked is None else asked
    if type(name) is not str or not name:
        raise Failure("invalid", "user is a name, UID or UID:GID")
    try:
        uid, gid = find_user(name)
    except LookupError as error:
        raise Failure("no_user", f"user: {error}") from None
    known = next((each for each in entries("/etc/passwd", 7) if each[2] == str(uid)), None)
    home = known[5] if asked is not None and known is not None else ""
    if not home.startswith("/"):
        home = agent.home if uid == os.geteuid() else "/"
    call.answer({"name": known[0] if known is not None else str(uid), "uid": uid, "gid": gid, "home": home})
