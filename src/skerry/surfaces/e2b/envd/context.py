"""What envd's calls know of the sandbox that they are for, and whose files and processes are meant."""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import Protocol

from starlette.requests import Request

from skerry.errors import InvalidSpec, UserNotFound
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.sandbox.users import Account, account

_LONGEST_NAME = 256


class Envd(Protocol):
    """The sandbox of a request, as whoever routes it gives it in `scope["skerry.e2b"]`."""

    @property
    def name(self) -> str:
        """Its id in E2B's form."""

    @property
    def sandbox(self) -> AsyncSandbox: ...

    @property
    def default_user(self) -> str: ...

    @property
    def envs(self) -> dict[str, str]:
        """Environment beside what the sandbox itself has."""

    @property
    def access_token(self) -> str | None: ...


def envd_of(request: Request) -> Envd:
    """The sandbox that a request is for."""
    found: Envd = request.scope["skerry.e2b"]
    return found


async def account_of(request: Request, name: str | None) -> Account:
    """The account of a user, or of the one whose files and processes are meant where nobody is named. Raises
    UserNotFound, and Unsupported where the box cannot be that one."""
    envd = envd_of(request)
    if name is None:
        name = envd.default_user
    if not name or len(name) > _LONGEST_NAME or "\0" in name or not name.isprintable():
        raise UserNotFound(f"invalid username: {name[:_LONGEST_NAME]!r}")
    try:
        return await account(envd.sandbox, name)
    except UserNotFound:
        raise UserNotFound(f"invalid username: '{name}'") from None


def named_user(request: Request) -> str | None:
    """The user that a call names, by basic authentication without a password."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(text.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise UserNotFound("invalid username: it is not readable") from None
    return decoded.partition(":")[0]


def resolve(path: str, home: str) -> str:
    """The absolute path that a client means: a relative one is in the home of its user. Raises InvalidSpec."""
    if "\0" in path:
        raise InvalidSpec("path: it holds a NUL", field="path")
    if path.startswith("~"):
        if path != "~" and not path.startswith("~/"):
            raise InvalidSpec("path: cannot expand user-specific home dir", field="path")
        path = path[2:]
    if not path.startswith("/"):
        path = posixpath.normpath(posixpath.join(home, path))
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
