"""One box for many tests of a class, where making one takes longer than most tests: it is emptied in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import pytest
from providers.lifetimes import LifetimeTests

from skerry.errors import SkerryError
from skerry.model.spec import SandboxId
from skerry.providers.base import Enforcement, Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance import ProviderConformance

_EMPTY = "rm -rf /tmp/* /tmp/.[!.]* ~/* ~/.[!.]* /.data/* /.data/.[!.]*; ls -A /tmp ~ | grep -v : | grep -c ."


class OnOneBox(LifetimeTests, ProviderConformance):
    _reused: ClassVar[tuple[SandboxId, Mapping[str, Enforcement]] | None] = None
    _make_again: ClassVar[Callable[[], Provider] | None] = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _end_with_the_class(cls) -> Iterator[None]:
        with cls.reusing():
            yield

    @classmethod
    @contextmanager
    def reusing(cls) -> Iterator[None]:
        cls._reused = cls._make_again = None
        yield
        if cls._reused is not None and cls._make_again is not None:
            asyncio.run(_destroy(cls._make_again(), cls._reused[0]))
            cls._reused = None

    @pytest.fixture
    async def sandbox(self, provider: Provider, make_provider: Callable[[], Provider]) -> AsyncIterator[AsyncSandbox]:
        cls = type(self)
        sandbox = await self._open(provider) or await AsyncSandbox.create(self.spec(provider), provider)
        cls._reused, cls._make_again = (sandbox.id, sandbox.enforced), make_provider
        yield sandbox
        if await _is_as_new(sandbox, self.idle_processes):
            await sandbox.close()
        else:
            cls._reused = None
            await provider.destroy(sandbox.id, volumes=True)

    async def _open(self, provider: Provider) -> AsyncSandbox | None:
        if self._reused is None:
            return None
        id, enforced = self._reused
        try:
            sandbox = await AsyncSandbox.open(id, provider)
        except SkerryError:
            await provider.destroy(id, volumes=True)
            return None
        sandbox.spec, sandbox.enforced = self.spec(provider), enforced
        return sandbox


async def _destroy(provider: Provider, id: SandboxId) -> None:
    await provider.destroy(id, volumes=True)
    await provider.aclose()


async def _is_as_new(sandbox: AsyncSandbox, idle_processes: int) -> bool:
    """Nothing runs in it and nothing lies in its folders; if not so, another takes its place."""
    try:
        for process in await sandbox.processes.list():
            if process.running:
                return False
        left = await sandbox.exec(_EMPTY, timeout_s=10)
        return left.text.strip() == "0" and (await sandbox.metrics()).processes <= idle_processes
    except SkerryError:
        return False
