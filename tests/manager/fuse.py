"""A program that dies, or is failed by its registry or provider, at a chosen call."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from skerry.errors import ProviderError, SkerryError, StoreUnavailable


class Crash(BaseException):
    """What kill -9 is to a program: nothing of it runs after."""


class Strike(NamedTuple):
    """At the call number `at`, `before` or `after` it took effect, the program dies or the call fails."""

    at: int
    after: bool
    kills: bool


class Fuse:
    """Counts the calls of one program."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.strike: Strike | None = None
        self.is_dead = False
        self._on_death = on_death
        self._calls = 0

    def arm(self, strike: Strike | None) -> None:
        self.strike, self._calls = strike, 0

    async def call(self, original: Callable[..., Awaitable[Any]], error: SkerryError, *args: Any, **kw: Any) -> Any:
        if self.is_dead:
            raise Crash
        due = self.strike is not None and self._calls == self.strike.at
        self._calls += 1
        if due and self.strike is not None and not self.strike.after:
            self._fire(self.strike, error)
        result = await original(*args, **kw)
        if self.is_dead:
            raise Crash  # another task of this program died while this one waited
        if due and self.strike is not None:
            self._fire(self.strike, error)
        return result

    def _fire(self, strike: Strike, error: SkerryError) -> None:
        self.strike = None
        if strike.kills:
            self.is_dead = True
            self._on_death()
            raise Crash
        raise error


class Fused:
    """A store or a provider, seen by one program."""

    def __init__(self, original: Any, fuse: Fuse, error: SkerryError) -> None:
        self._original, self._fuse, self._error = original, fuse, error

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def call(*args: Any, **kw: Any) -> Any:
            return await self._fuse.call(value, self._error, *args, **kw)

        return call


def fused_store(store: Any, fuse: Fuse) -> Any:
    return Fused(store, fuse, StoreUnavailable("the test made the registry fail"))


def fused_provider(provider: Any, fuse: Fuse) -> Any:
    return Fused(provider, fuse, ProviderError("the test made the provider fail"))
