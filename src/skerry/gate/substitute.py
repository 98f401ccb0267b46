"""Substitution of values for placeholders in requests: in headers, in Basic authentication and in the query alone."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote_from_bytes, unquote_to_bytes

from skerry.gate.secrets import PREFIX

Headers = list[tuple[bytes, bytes]]
_Change = Callable[[bytes], bytes]

_MARK = PREFIX.encode()
_NOT_IN_HEADERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LEAST_HIDDEN = 8
"""Shorter values would be found by chance in what they have nothing to do with."""


class Unfit(Exception):
    """A value that cannot stand where its placeholder does; the text names the secret."""


class Substitution:
    """Finds the placeholders of a box in its requests, and puts values in."""

    def __init__(self, placeholders: Mapping[str, str]) -> None:
        """`placeholders`: those that count for the host, by the names of their secrets."""
        self._names = {text.encode(): name for name, text in placeholders.items()}
        self._plain = re.compile(b"|".join(map(re.escape, self._names)) or b"(?!)")
        self._quoted = re.compile(b"|".join(map(_any_spelling, self._names)) or b"(?!)")

    def find(self, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> set[str]:
        """Names of the secrets whose placeholders are in a request."""
        found: set[str] = set()

        def note(text: bytes) -> bytes:
            found.add(self._names[text])
            return b""

        self._in_target(target, note)
        for name, value in headers:
            self._in_header(name, value, note)
        return found

    def put_in(self, target: bytes, headers: Headers, values: Mapping[str, str]) -> tuple[bytes, Headers]:
        """Target and headers with those values. Raises Unfit."""

        def value_of(text: bytes) -> bytes:
            return values[self._names[text]].encode()

        changed = [(name, self._in_header(name, value, value_of)) for name, value in headers]
        for (_, before), (_, after) in zip(headers, changed, strict=True):
            if after != before and (_NOT_IN_HEADERS.search(after) or after != after.strip()):
                names = " or ".join(sorted({self._names[text] for text in self._plain.findall(before)}))
                raise Unfit(f"the value of the secret {names} has characters that no header can have")
        return self._in_target(target, value_of), changed

    def hide(self, head: bytes, values: Mapping[str, str]) -> bytes:
        """The head of an answer with placeholders where the host shows values that it was sent."""
        for text, name in self._names.items():
            value = values.get(name, "").encode()
            if len(value) >= _LEAST_HIDDEN:
                head = head.replace(value, text).replace(quote_from_bytes(value, safe="").encode(), text)
        return head

    def _in_header(self, name: bytes, value: bytes, change: _Change) -> bytes:
        if _MARK in value:
            return self._plain.sub(lambda match: change(match[0]), value)
        if name.lower() == b"authorization" and value[:6].lower() == b"basic ":
            try:
                pair = base64.b64decode(value[6:], validate=True)
            except binascii.Error:
                return value
            if _MARK in pair:
                changed = self._plain.sub(lambda match: change(match[0]), pair)
                return value[:6] + base64.b64encode(changed)
        return value

    def _in_target(self, target: bytes, change: _Change) -> bytes:
        path, mark, query = target.partition(b"?")
        if _MARK not in query and b"%" not in query:
            return target

        def quoted(match: re.Match[bytes]) -> bytes:
            return quote_from_bytes(change(unquote_to_bytes(match[0])), safe="").encode()

        return path + mark + self._quoted.sub(quoted, query)


def _any_spelling(placeholder: bytes) -> bytes:
    """A pattern for a placeholder of which any character may be percent-encoded."""
    return b"".join(b"(?:%b|%%%b)" % (re.escape(bytes([c])), _hex(c)) for c in placeholder)


def _hex(character: int) -> bytes:
    digits = f"{character:02x}"
    return "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in digits).encode()
