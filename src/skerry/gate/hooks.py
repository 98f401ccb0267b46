"""Hooks of secrets: functions of the host that change a request with a value, where putting it in is not enough.

A hook is `(request: Request, identity: Identity) -> Request`. It is called in a thread, for each request to the hosts
of its secret, after placeholders were replaced.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from weakref import WeakValueDictionary

import msgspec

from skerry.gate.base import Refused
from skerry.gate.secrets import Value
from skerry.model.spec import SandboxId

MAX_BODY = 8 << 20
_TIMEOUT_S = 10.0
_THREADS = 8
_CALLS_OF_ONE = _THREADS // 2
_BODIES_OF_ONE = 8


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request on its way out, as a hook sees and returns it."""

    method: str
    target: str
    """Path and query, as they are sent."""
    headers: tuple[tuple[str, str], ...]
    body: bytes | None = None
    """The whole body, if the hook asked for it by raising NeedsBody; else it is sent on as it comes."""

    def header(self, name: str) -> str | None:
        """The value of a header, whatever the case of its name; the first of several."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def but(self, name: str, value: str) -> Request:
        """This request with another value of a header."""
        kept = tuple(pair for pair in self.headers if pair[0].lower() != name.lower())
        return msgspec.structs.replace(self, headers=(*kept, (name, value)))


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who makes a request, and the secret that a hook is for."""

    sandbox: SandboxId
    labels: Mapping[str, str]
    host: str
    port: int
    secret: str
    """The name of the secret."""
    value: Value


class NeedsBody(Exception):
    """Raised by a hook that is to be called again with the request's whole body, which may then have 8 MiB at most."""


class HookFailed(Exception):
    """A hook cannot be loaded, or raised; the text says which, and nothing that the hook said."""


Hook = Callable[[Request, Identity], Request]
_Outcome = tuple[Request | None, Exception | None]


@cache
def load(text: str) -> Hook:
    """The function of `MODULE:FUNCTION`. Raises HookFailed."""
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise HookFailed(f"the hook {text} cannot be loaded: {type(error).__name__}") from None
    if not callable(found):
        raise HookFailed(f"the hook {text} is no function")
    return found  # type: ignore[no-any-return]


class Share:
    """What one sandbox may have of the gate for its hooks, at once."""

    def __init__(self) -> None:
        self.calls = asyncio.Semaphore(_CALLS_OF_ONE)
        self.bodies = asyncio.Semaphore(_BODIES_OF_ONE)


class Hooks:
    """Calls hooks in a few threads, so that one that hangs holds up no other work of the gate, nor its end, nor hooks
    for another sandbox."""

    def __init__(self) -> None:
        self._threads = asyncio.Semaphore(_THREADS)
        self._shares: WeakValueDictionary[SandboxId, Share] = WeakValueDictionary()

    def share(self, id: SandboxId) -> Share:
        """The share of a sandbox, the same for as long as anybody has it."""
        return self._shares.setdefault(id, Share())

    async def call(self, text: str, request: Request, identity: Identity) -> Request:
        """What a hook makes of a request. Raises NeedsBody, Refused if the hook does, or HookFailed."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                share = self.share(identity.sandbox)
                await share.calls.acquire()
                try:
                    await self._threads.acquire()
                except BaseException:
                    share.calls.release()
                    raise
                made, error = await self._begin(text, request, identity, share)
            if error is not None:
                raise error
        except (NeedsBody, Refused, HookFailed):
            raise
        except TimeoutError:
            raise HookFailed(f"the hook {text} did not end in {_TIMEOUT_S:g} s") from None
        except Exception as error:
            raise HookFailed(f"the hook {text} failed: {type(error).__name__}") from None
        if not isinstance(made, Request):
            raise HookFailed(f"the hook {text} returned no Request")
        return made

    def _begin(self, text: str, request: Request, identity: Identity, share: Share) -> asyncio.Future[_Outcome]:
        """Call a hook in a thread, which has its place until it ends, whoever waits for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Outcome] = loop.create_future()

        def settle(outcome: _Outcome) -> None:
            self._threads.release()
            share.calls.release()
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome: _Outcome
            try:
                outcome = load(text)(request, identity), None
            except Exception as error:
                outcome = None, error
            except BaseException:  # it would end more than this thread
                outcome = None, HookFailed(f"the hook {text} would have us end")
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name="hook", daemon=True).start()
        return future
