"""Incus's API, as far as we need it: every wait with a deadline, what was begun waited for, refusals as our errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec

from skerry.errors import ProviderError, ProviderUnavailable
from skerry.http import AnswerStream, Body, HttpClient, HttpError, NoAnswer, Refused
from skerry.providers.incus import refusals, websocket
from skerry.providers.incus.settings import IncusConfig
from skerry.providers.incus.websocket import WebSocket

T = TypeVar("T")

PROVIDER = "incus"
FIX = (
    "install Incus (apt-get install incus) and set it up (incus admin init --minimal); be root or in the group "
    "incus-admin, or set providers.incus.host"
)
_FIX_SILENCE = (
    "look at its log; in a cluster at `incus cluster list`: a member that went away is waited for until that is noticed"
)
_SLACK_S = 5.0
"""How much longer than it was told to wait the daemon may take to say that it did."""
_SUCCESS = 200
_RUNNING = (103, 105)


class Operation(msgspec.Struct):
    """Something that the daemon does in its own time."""

    id: str = ""
    status_code: int = 0
    err: str = ""
    metadata: dict[str, Any] | None = None
    resources: dict[str, list[str]] | None = None


class _Answer(msgspec.Struct):
    type: str = ""
    metadata: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class Api:
    """One daemon, or a cluster through one of its members. It holds no connection and no state."""

    def __init__(self, config: IncusConfig) -> None:
        self._http = HttpClient(config.host, tls=config.tls(), timeout_s=config.timeout_s)
        self.project = config.project

    @property
    def address(self) -> str:
        return self._http.address

    @property
    def is_remote(self) -> bool:
        return not self.address.startswith("unix:")

    async def get(self, path: str, type: type[T], *, query: Mapping[str, Any] | None = None) -> T:
        answer = await self._ask("GET", path, query=query)
        return self._decoded(answer.metadata, type)

    async def do(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Ask for a change, and wait until it is made."""
        timeout_s = self._http.timeout_s if timeout_s is None else timeout_s
        answer = await self._ask(
            method, path, query=query, json=json, body=body, headers=headers, timeout_s=timeout_s + _SLACK_S
        )
        if answer.type != "async":
            return Operation(status_code=_SUCCESS)
        return await self._wait(self._decoded(answer.metadata, Operation).id, timeout_s)

    async def begin(self, method: str, path: str, *, json: Any) -> Operation:
        """Ask for what goes on while somebody talks to it."""
        answer = await self._ask(method, path, json=json)
        return self._decoded(answer.metadata, Operation)

    async def _wait(self, id: str, timeout_s: float) -> Operation:
        # By its id: in a cluster the address that is answered has more in it than a path.
        path, query = f"/1.0/operations/{id}/wait", {"timeout": str(int(timeout_s) or 1)}
        answer = await self._ask("GET", path, query=query, timeout_s=timeout_s + _SLACK_S)
        ended = self._decoded(answer.metadata, Operation)
        if ended.status_code in _RUNNING:
            reason = f"what it was asked for was not done within {timeout_s:g} s; it may still be"
            raise ProviderUnavailable(PROVIDER, reason, fix="look at `incus operation list`, and at the daemon's log")
        if ended.status_code != _SUCCESS:
            raise refusals.refusal(ended.status_code, ended.err)
        return ended

    async def raw(self, path: str, *, query: Mapping[str, Any] | None = None) -> bytes:
        """An answer that is a file."""
        with self._told():
            answer = await self._http.request("GET", path, query=self._in_project(query))
        if answer.status >= 400:
            raise refusals.of_answer(answer.status, answer.body)
        return answer.body

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AnswerStream]:
        """An answer that comes piece by piece."""
        with self._told():
            async with self._http.stream("GET", path, query=self._in_project(None)) as answer:
                if answer.status >= 400:
                    async with asyncio.timeout(self._http.timeout_s):
                        raise refusals.of_answer(answer.status, await answer.whole())
                yield answer

    async def websocket(self, path: str, *, query: Mapping[str, Any]) -> WebSocket:
        with self._told():
            try:
                return await websocket.connect(self._http, path, self._in_project(query))
            except Refused as error:
                raise refusals.of_answer(error.answer.status, error.answer.body) from None

    async def _ask(self, method: str, path: str, *, query: Mapping[str, Any] | None = None, **options: Any) -> _Answer:
        with self._told():
            answer = await self._http.request(method, path, query=self._in_project(query), **options)
            if answer.status >= 400:
                raise refusals.of_answer(answer.status, answer.body)
            told = answer.json(_Answer)
        if told.type == "error":  # with a status that says otherwise
            raise refusals.refusal(answer.status, told.error)
        return told

    def _decoded(self, metadata: msgspec.Raw, type: type[T]) -> T:
        try:
            return msgspec.json.decode(metadata, type=type, strict=False)
        except msgspec.DecodeError as error:
            raise ProviderError(f"{PROVIDER}: an answer is not what was expected: {error}") from error

    def _in_project(self, query: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"project": self.project, **(query or {})}

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except NoAnswer as error:
            fix = FIX if isinstance(error.__cause__, OSError) else _FIX_SILENCE
            raise ProviderUnavailable(PROVIDER, f"its daemon does not answer: {error}", fix=fix) from error
        except TimeoutError:
            reason = "its daemon began an answer and did not end it"
            raise ProviderUnavailable(PROVIDER, reason, fix=_FIX_SILENCE) from None
        except Refused:
            raise
        except HttpError as error:
            raise ProviderError(f"{PROVIDER}: {error}") from error
