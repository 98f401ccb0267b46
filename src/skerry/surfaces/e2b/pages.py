"""Lists a page at a time: the header of an answer names where the next one begins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import TypeVar

from skerry.errors import InvalidSpec

T = TypeVar("T")
MOST = 100
HEADER = "x-next-token"


def paged(
    found: Iterable[tuple[float, str, T]], limit: str | None, token: str | None, *, is_ascending: bool = False
) -> tuple[list[T], dict[str, str]]:
    """A page of what has a time and a name each, the newest first unless it is said otherwise, and the headers that
    name the next. Raises InvalidSpec."""
    rest = sorted(found, key=lambda each: each[:2], reverse=not is_ascending)
    if token is not None:
        last = _read(token)
        rest = [each for each in rest if (each[:2] > last if is_ascending else each[:2] < last)]
    most = _limit_of(limit)
    page = rest[:most]
    if len(rest) <= most:
        return [each[2] for each in page], {}
    at, name = page[-1][:2]
    return [each[2] for each in page], {HEADER: base64.urlsafe_b64encode(f"{at!r} {name}".encode()).decode()}


def _read(token: str) -> tuple[float, str]:
    try:
        at, _, name = base64.urlsafe_b64decode(token.encode()).decode().partition(" ")
        return float(at), name
    except (ValueError, binascii.Error):
        raise InvalidSpec("nextToken: it is none of ours", field="nextToken") from None


def _limit_of(text: str | None) -> int:
    if text is None:
        return MOST
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise InvalidSpec(f"limit: 1 to {MOST}", field="limit")
    return min(int(text), MOST)
