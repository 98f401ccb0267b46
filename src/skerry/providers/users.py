"""The users of a box: their numbers by their names, and the agent that serves another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def numbers(passwd: str, name: str) -> tuple[int, int] | None:
    """Uid and gid by a name that a box's own list of users has."""
    for line in passwd.splitlines():
        entry = line.split(":")
        if len(entry) > 3 and entry[0] == name and entry[2].isdigit() and entry[3].isdigit():
            return int(entry[2]), int(entry[3])
    return None


def agent_config(first: Mapping[str, Any]) -> str:
    """The configuration of a second agent, for another user, from the first one's: it serves one stream, its own."""
    return msgspec.json.encode({**first, "listen": {"stdio": True}, "lifetime_s": None, "idle_s": None}).decode()
