"""The network of a sandbox that has rules, changed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from skerry import aio
from skerry.errors import NotFound
from skerry.model.records import Record
from skerry.model.spec import Network, Spec

Decide = Callable[[Spec], tuple[Sequence[str], Sequence[str]]]
"""What a sandbox may and may not reach from now on, from its spec as it is."""


class NetworkRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox may reach."""

    network: str
    """`rules`; rules of any other network cannot be changed."""
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    reach: tuple[str, ...]
    secrets: dict[str, tuple[str, ...]]
    """Hosts of each secret, by its name."""

    @classmethod
    def of(cls, spec: Spec) -> NetworkRules:
        secrets = {name: secret.hosts for name, secret in spec.secrets.items()}
        return cls(network=str(spec.network), allow=spec.allow, deny=spec.deny, reach=spec.reach, secrets=secrets)


class _Opened(NamedTuple):
    """Change that `open_to` takes back."""

    allowed: list[str]
    denied: list[str]


class AsyncSandboxNetwork:
    """Rules of a sandbox that was made with some, or with `network="rules"`. A change holds for the next connection
    when the call returns, and connections that it forbids have ended. Rules are written as in a spec. Each call raises
    WrongState for a box with another network, and InvalidSpec for what is no rule."""

    def __init__(
        self,
        change: Callable[[Decide], Awaitable[Record]],
        look: Callable[[], Awaitable[Record]],
        provide: Callable[[Mapping[str, str]], Awaitable[None]],
    ) -> None:
        self._change = change
        self._look = look
        self._provide = provide

    async def show(self) -> NetworkRules:
        """The rules, as the registry has them now."""
        return NetworkRules.of((await self._look()).spec)

    async def allow(self, *rules: str) -> NetworkRules:
        """Allow more, and deny it no longer by the same rules."""
        return await self._decide(lambda spec: ((*spec.allow, *rules), _without(spec.deny, rules)))

    async def deny(self, *rules: str) -> NetworkRules:
        """Deny it whatever allows it, and allow it no longer by the same rules."""
        return await self._decide(lambda spec: (_without(spec.allow, rules), (*spec.deny, *rules)))

    async def set(self, *, allow: Sequence[str] | None = None, deny: Sequence[str] | None = None) -> NetworkRules:
        """Have these rules and no others; None leaves them as they are."""
        from skerry.model.rules import refuse_text  # most sandboxes have no rules, and start without it

        for field, rules in (("allow", allow), ("deny", deny)):
            refuse_text(rules or (), field)
        return await self._decide(
            lambda spec: (spec.allow if allow is None else allow, spec.deny if deny is None else deny)
        )

    async def provide(self, values: Mapping[str, str]) -> None:
        """Give secrets other values, which the next request has. They are in the memory of the gate alone. Raises
        InvalidSpec for one that the sandbox does not have, or whose value comes from a file or a command."""
        await self._provide(values)

    @asynccontextmanager
    async def open_to(self, *rules: str) -> AsyncIterator[None]:
        """Allow more while the `async with` lasts. At its end, however that comes, what it allowed is allowed no
        longer, and what others changed meanwhile stays."""
        opened = _Opened([], [])

        def open(spec: Spec) -> tuple[Sequence[str], Sequence[str]]:
            texts = _spelled(rules)
            opened.allowed[:] = [text for text in texts if text not in spec.allow]
            opened.denied[:] = [text for text in texts if text in spec.deny]
            return (*spec.allow, *rules), _without(spec.deny, rules)

        def close(spec: Spec) -> tuple[Sequence[str], Sequence[str]]:
            return _without(spec.allow, opened.allowed), (*spec.deny, *opened.denied)

        try:
            await self._change(open)
            yield
        finally:
            if opened.allowed or opened.denied:
                await aio.run_to_end(self._close(close))

    async def _close(self, close: Decide) -> None:
        try:
            await self._change(close)
        except NotFound:
            return  # it has ended, and all its connections with it

    async def _decide(self, decide: Decide) -> NetworkRules:
        return NetworkRules.of((await self._change(decide)).spec)


def _spelled(rules: Sequence[str]) -> tuple[str, ...]:
    """Rules in the one spelling that a spec gives them."""
    return Spec(allow=tuple(rules), network=Network.RULES).allow


def _without(known: Sequence[str], rules: Sequence[str]) -> list[str]:
    gone = set(_spelled(rules))
    return [text for text in known if text not in gone]
