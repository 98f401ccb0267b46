"""Headers that are put into every request to a host: a hook, whose secret's value says which, as JSON."""

from __future__ import annotations

import msgspec

from skerry.gate.base import Unreachable
from skerry.gate.hooks import Identity, Request

HOOK = "skerry.gate.headers:put"


class Headers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of such a secret."""

    headers: dict[str, str] = {}
    missing: str = ""
    """Why they cannot be had, if so: then no request is sent without them."""

    def value(self) -> str:
        return msgspec.json.encode(self).decode()


def put(request: Request, identity: Identity) -> Request:
    """Put the headers in, in the place of those of the same names. Raises Unreachable if there are none to be had."""
    found = msgspec.json.decode(identity.value.reveal(), type=Headers)
    if found.missing:
        raise Unreachable(f"the headers for {identity.host}: {found.missing}")
    for name, value in found.headers.items():
        request = request.but(name, value)
    return request
