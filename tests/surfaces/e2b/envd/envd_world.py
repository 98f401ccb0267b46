"""envd of one real sandbox on a port of its own, and a client that says exactly what a test wants it to say."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.e2b.envd import routes

_STREAM = "application/connect+json"
_HEAD = struct.Struct(">BI")
DEADLINE_S = 20.0


class Sandboxed:
    """What envd's calls know of the sandbox."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.name = "sandbox0"
        self.sandbox = sandbox
        self.default_user = "user"
        self.envs: dict[str, str] = {}
        self.access_token: str | None = None


def packed(message: object, flags: int = 0) -> bytes:
    """An envelope of a stream."""
    body = json.dumps(message).encode()
    return _HEAD.pack(flags, len(body)) + body


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Answers:
    """Messages of a stream, as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._pieces = response.aiter_raw()
        self._buffer = b""

    async def next(self) -> tuple[int, Any]:
        """The flags and the content of the next message."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self._buffer) < _HEAD.size or len(self._buffer) < _HEAD.size + self._length():
                self._buffer += await anext(self._pieces)
        flags, length = _HEAD.unpack_from(self._buffer)
        body, self._buffer = self._buffer[5 : 5 + length], self._buffer[5 + length :]
        return flags, json.loads(body)

    def _length(self) -> int:
        return int(_HEAD.unpack_from(self._buffer)[1])

    async def event(self) -> dict[str, Any]:
        """The next event; the end of the stream is none."""
        flags, message = await self.next()
        assert flags == 0, message
        found: dict[str, Any] = message.get("event", message)
        return found

    async def pid(self) -> int:
        return int((await self.event())["start"]["pid"])

    async def output(self, until: bytes = b"", kind: str = "stdout") -> bytes:
        """What a process says, until that is in it."""
        found = b""
        while until not in found or not found:
            found += base64.b64decode((await self.event())["data"].get(kind, ""))
        return found

    async def rest(self) -> list[Any]:
        """All messages to the last, which tells how the stream ended."""
        found = []
        while True:
            flags, message = await self.next()
            found.append(message)
            if flags:
                return found


class Client:
    """A client of envd."""

    def __init__(self, http: httpx.AsyncClient, port: int) -> None:
        self.http = http
        self.port = port

    async def call(self, method: str, message: object = None, **headers: str) -> httpx.Response:
        """A call of one message."""
        return await self.http.post(f"/{method}", json=message or {}, headers=named(headers))

    async def result(self, method: str, message: object = None, **headers: str) -> Any:
        """The result of a call that succeeds."""
        response = await self.call(method, message, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def code(self, method: str, message: object = None, **headers: str) -> str:
        """The code with which a call fails."""
        response = await self.call(method, message, **headers)
        assert response.status_code >= 400, response.text
        return str(response.json()["code"])

    @asynccontextmanager
    async def stream(self, method: str, message: object, **headers: str) -> AsyncIterator[Answers]:
        """A call with a stream of answers."""
        head = {"content-type": _STREAM, **named(headers)}
        async with self.http.stream("POST", f"/{method}", content=packed(message), headers=head) as response:
            assert response.status_code == 200, await response.aread()
            yield Answers(response)

    @asynccontextmanager
    async def process(
        self, *argv: str, options: dict[str, Any] | None = None, **headers: str
    ) -> AsyncIterator[Answers]:
        message = {"process": {"cmd": argv[0], "args": argv[1:]}, **(options or {})}
        async with self.stream("process.Process/Start", message, **headers) as answers:
            yield answers

    async def run(self, *argv: str, options: dict[str, Any] | None = None, **headers: str) -> tuple[bytes, Any]:
        """The standard output of a process, and the last two messages of its stream."""
        async with self.process(*argv, options=options, **headers) as answers:
            messages = await answers.rest()
        events = [each["event"] for each in messages[:-1]]
        text = b"".join(base64.b64decode(each["data"].get("stdout", "")) for each in events if "data" in each)
        return text, [events[-1], messages[-1]]

    async def failure(self, method: str, content: bytes, **headers: str) -> tuple[int, Any]:
        """The answer to a stream that fails at once: its status, and its error."""
        head = {"content-type": _STREAM, **named(headers)}
        response = await self.http.post(f"/{method}", content=content, headers=head)
        if response.status_code != 200:
            return response.status_code, None
        return 200, json.loads(response.content[_HEAD.size :]).get("error")


def named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def basic(user: str) -> str:
    return "Basic " + coded(f"{user}:".encode())


@asynccontextmanager
async def serving(boxed: Sandboxed) -> AsyncIterator[Client]:
    """A server of envd's calls, and a client."""
    inner = Starlette(routes=routes())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["skerry.e2b"] = boxed
        await inner(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(app, lifespan="off", log_config=None, http="httptools", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
            yield Client(http, port)
    finally:
        server.should_exit = server.force_exit = True
        await task
        listener.close()
