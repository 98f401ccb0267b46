"""Docker's API, as far as we need it: requests with a deadline, answers with a type, refusals as our own errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from skerry.errors import ConfigError, Conflict, NotFound, ProviderError, ProviderUnavailable
from skerry.http import AnswerStream, Body, HttpClient, HttpError, NoAnswer, Refused

T = TypeVar("T")

_MAX_MESSAGE = 2000


class Engine:
    """One daemon. It holds no connection and no state: any number of programs may talk to it."""

    def __init__(self, address: str, *, provider: str, fix: str, timeout_s: float) -> None:
        self.provider = provider
        self._fix = fix
        self._http = HttpClient(_url(address), timeout_s=timeout_s)

    @property
    def address(self) -> str:
        return self._http.address

    async def get(self, path: str, type: type[T], *, query: Mapping[str, Any] | None = None) -> T:
        return await self._ask("GET", path, type, query=query)

    async def post(
        self,
        path: str,
        type: type[T] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        body: Body | None = None,
        timeout_s: float | None = None,
    ) -> T:
        return await self._ask("POST", path, type, query=query, json=json, body=body, timeout_s=timeout_s)

    async def put(self, path: str, *, query: Mapping[str, Any], body: Body, timeout_s: float | None = None) -> None:
        """Send a tar."""
        await self._ask("PUT", path, None, query=query, body=body, timeout_s=timeout_s)

    async def delete(
        self, path: str, *, query: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> None:
        await self._ask("DELETE", path, None, query=query, timeout_s=timeout_s)

    async def _ask(self, method: str, path: str, type: type[T] | None, **options: Any) -> T:
        if options.get("body") is not None:
            options["headers"] = {"Content-Type": "application/x-tar"}
        with self._told():
            answer = await self._http.request(method, path, **options)
            if answer.status >= 400:
                raise self._refusal(answer.status, answer.body)
            # Without a type nobody reads the answer.
            return answer.json(type) if type is not None else None  # type: ignore[return-value]

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        whole_s: float | None = None,
    ) -> AsyncIterator[AnswerStream]:
        """An answer that comes piece by piece; `timeout_s` is for its beginning, `whole_s` for all of it."""
        if body is not None:
            headers = {"Content-Type": "application/x-tar", **(headers or {})}
        with self._told():
            async with (
                asyncio.timeout(whole_s),
                self._http.stream(method, path, query=query, body=body, headers=headers, timeout_s=timeout_s) as answer,
            ):
                if answer.status >= 400:
                    async with asyncio.timeout(self._http.timeout_s):
                        raise self._refusal(answer.status, await answer.whole())
                yield answer

    async def upgrade(self, path: str, *, json: Any) -> tuple[int, bytes]:
        """The connection itself, as a descriptor that is the caller's, and what came early."""
        with self._told():
            try:
                return await self._http.upgrade("POST", path, json=json)
            except Refused as error:
                raise self._refusal(error.answer.status, error.answer.body) from None

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except NoAnswer as error:
            raise ProviderUnavailable(self.provider, f"its daemon does not answer: {error}", fix=self._fix) from error
        except TimeoutError:
            reason = "its daemon began an answer, and did not come to its end in time"
            raise ProviderUnavailable(self.provider, reason, fix=self._fix) from None
        except HttpError as error:
            raise ProviderError(f"{self.provider}: {error}") from error

    def _refusal(self, status: int, body: bytes) -> NotFound | Conflict | ProviderError:
        message = _message(body) or f"status {status}, without a reason"
        if status == 404:
            return NotFound(f"{self.provider}: {message}")
        if status == 409:
            return Conflict(f"{self.provider}: {message}")
        return ProviderError(f"{self.provider} refused (status {status}): {message}")


def _url(address: str) -> str:
    scheme, _, rest = address.partition("://")
    if scheme == "unix" and rest:
        return address
    if scheme in ("tcp", "http") and rest:
        with suppress(ValueError):  # urlsplit's way to refuse a port
            _ = urlsplit(f"http://{rest}").port
            return f"http://{rest}"
    raise ConfigError(
        f"the daemon's address {address!r} is neither unix:///path nor tcp://host:port; for one behind ssh or TLS, "
        "forward its socket, e.g. ssh -L /tmp/docker.sock:/var/run/docker.sock HOST"
    )


def _message(body: bytes) -> str:
    try:
        data = msgspec.json.decode(body)
        text = data.get("message") or data.get("cause") if isinstance(data, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = None
    return str(text or body.decode(errors="replace")).strip()[:_MAX_MESSAGE]
