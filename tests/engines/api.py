"""A request to an engine, apart from the client that is under test."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import urlencode, urlsplit


class Refused(Exception):
    """The engine answered, and not with success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(
    address: str,
    method: str,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    json_body: Any = None,
    body: IO[bytes] | bytes | None = None,
    timeout_s: float = 60.0,
) -> bytes:
    """The body of an answer with success."""
    connection = _Connection(urlsplit(address).path, timeout_s)
    target = f"{path}?{urlencode(query)}" if query else path
    headers = {}
    if json_body is not None:
        body, headers = json.dumps(json_body).encode(), {"Content-Type": "application/json"}
    elif body is not None:
        headers = {"Content-Type": "application/x-tar"}
    try:
        connection.request(
            method, target, body=body, headers=headers, encode_chunked=not isinstance(body, bytes | None)
        )
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status >= 400:
        raise Refused(answer.status, text.decode(errors="replace").strip())
    return text


def ask_json(address: str, method: str, path: str, query: Mapping[str, str] | None = None, **options: Any) -> Any:
    return json.loads(ask(address, method, path, query, **options) or b"null")
