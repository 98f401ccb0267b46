"""Paths and names on the wire: any bytes that a file can be called."""

from __future__ import annotations

import binascii
import os

from .channel import Failure
from .spawn import expand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent


def path_of(agent: Agent, params: dict[str, Any], name: str = "path") -> bytes:
    """The path of a request as bytes, absolute."""
    encoded, text = params.get(f"{name}64"), params.get(name)
    try:
        if type(encoded) is str:
            path = binascii.a2b_base64(encoded)
        elif type(text) is str and text:
            path = os.fsencode(expand(text, agent.home))
        else:
            raise Failure("invalid", f"{name} is missing")
    except ValueError:
        raise Failure("invalid", f"{name}64 is not base64") from None
    if b"\0" in path:
        raise Failure("invalid", f"{name} has a NUL byte")
    whole = os.path.join(os.fsencode(agent.home), path)
    return b"/" + b"/".join(part for part in whole.split(b"/") if part not in (b"", b"."))


def named(key: str, value: bytes) -> dict[str, str]:
    """A name for the wire: text where it is UTF-8, base64 of the bytes where it is not."""
    try:
        return {key: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{key}64": binascii.b2a_base64(value, newline=False).decode("ascii")}


def shown(path: bytes) -> str:
    """A path for a message."""
    return path.decode("utf-8", "replace")
