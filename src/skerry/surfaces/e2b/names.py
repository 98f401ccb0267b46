"""Names: sandboxes and ports as E2B's SDKs write them, in headers, host names and paths."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from skerry.errors import NotFound
from skerry.model.spec import SandboxId

ENVD = 49983
"""The port at which E2B's own agent answers."""
INTERPRETER = 49999
TAG = "default"
"""The tag of what is named without one."""
_ID = re.compile(r"[0-9a-f]{32}")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(r"(\d{1,5})-([0-9a-z]{1,64})\.")


class Place(NamedTuple):
    """A port of a sandbox, by the sandbox's name in E2B's form."""

    port: int
    name: str


def shown(id: SandboxId) -> str:
    """A sandbox's id as E2B's: host names and SDKs take letters and digits alone."""
    return id.replace("-", "")


def read(name: str) -> SandboxId:
    """The id of a sandbox. Raises NotFound for what is none."""
    if not _ID.fullmatch(name):
        raise NotFound(f"sandbox {name[:64]!r} was not found")
    return SandboxId(str(uuid.UUID(name)))


def place_of_host(host: str) -> Place | None:
    """The port that a Host header names, as in `49983-ID.DOMAIN`; None if it names none."""
    found = _HOST.match(host.lower())
    return None if found is None else _place(found[1], found[2])


def place_of_headers(name: str | None, port: str | None) -> Place | None:
    """The port that the SDK's own headers name; without a port it is that of envd."""
    if not name:
        return None
    return _place(port or str(ENVD), name)


def _place(port: str, name: str) -> Place | None:
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    return Place(number, name) if 0 < number < 65536 else None


def is_plain(name: str) -> bool:
    """Whether a name of a template or snapshot has only letters that names have."""
    return bool(_PLAIN.fullmatch(name))


def is_called(id: str, known: Iterable[str], name: str) -> bool:
    """Whether something is meant by a name: its id, or one of those it is known by, with a tag or without one."""
    plain, _, tag = name.rpartition("/")[2].partition(":")
    return id == plain or f"{plain}:{tag or TAG}" in known
