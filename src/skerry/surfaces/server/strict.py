"""Strict HTTP/1.1: what could be read in more than one way is refused before anybody looks at it.

uvicorn's parser refuses two lengths, a length beside a transfer coding, and lines that do not end as lines do. This
adds one host, a target that is a path, trailers that are no headers, and one request at a time.
"""

from __future__ import annotations

import re

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from skerry.surfaces.rest import problems

MAX_HEADERS = 100
_TARGET = re.compile(rb"/[!-~]*")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class _NotStrict(Exception):
    """A request that is refused."""


class StrictProtocol(HttpToolsProtocol):
    """HTTP of one client, in the one form that no two programs read differently."""

    _may_be_header = True
    """Whether a line with a colon is a header; after the head it is a trailer."""

    def on_message_begin(self) -> None:
        if self.cycle is not None and not _is_answered(self.cycle):
            # nobody would tell the call under way that its client has gone
            raise _NotStrict("a request while the one before it is not answered")
        super().on_message_begin()
        self.scope["skerry.transport"] = self.transport  # type: ignore[typeddict-unknown-key]
        self._may_be_header = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._may_be_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._may_be_header = False
        self._check()
        super().on_headers_complete()

    def _check(self) -> None:
        """Raise _NotStrict for a head that is not in the one form."""
        names = [name for name, _ in self.headers]
        if not _TARGET.fullmatch(self.url) or not all(_VALUE.fullmatch(value) for _, value in self.headers):
            raise _NotStrict("a target that is no path, or a value that is no text")
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or names.count(b"host") != 1 or len(names) > MAX_HEADERS:
            raise _NotStrict("a request has one host, and a number of headers that is bounded")
        lengths = [(name, value.lower()) for name, value in self.headers if name in _LENGTHS]
        codings = [value for name, value in lengths if name == b"transfer-encoding"]
        if len(lengths) > 1 or (codings and (version == "1.0" or codings != [b"chunked"])):
            raise _NotStrict("a request has one length")
        if lengths and self.parser.should_upgrade() and self._should_upgrade():
            raise _NotStrict("a WebSocket begins without a body")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; uvicorn calls this for all that it cannot read."""
        self.refuse(400, "malformed", "the request could be read in more than one way, or in none")

    def refuse(self, status: int, code: str, detail: str, *headers: str) -> None:
        """Answer with a problem, unless something of another answer is on its way, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = msgspec.json.encode(problems.make(status, code, detail))
            lines = [f"content-type: {problems.CONTENT_TYPE}", f"content-length: {len(body)}", *headers]
            head = "\r\n".join((*lines, "connection: close", "", ""))
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


def _is_answered(cycle: RequestResponseCycle) -> bool:
    """Whether the client has all of an answer: of one whose length it knows also before whoever makes it has said that
    this is the end."""
    if cycle.response_complete or not cycle.response_started:
        return cycle.response_complete
    return not cycle.chunked_encoding and (cycle.expected_content_length == 0 or cycle.scope["method"] == "HEAD")
