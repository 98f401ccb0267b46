"""Limits are held, seen from inside; what cannot be held or done is refused before anything exists."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skerry.errors import AgentError, DiskFull, NotFound, Unsupported
from skerry.model.spec import Spec
from skerry.providers.base import VERBS, BoxState, Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite, eventually

_MIB = 1 << 20


class LimitTests(Suite):
    memory_may_end_box = False
    """True where a box that runs out of memory may end whole, and not only what asked for too much."""

    @asynccontextmanager
    async def _limited(self, provider: Provider, **fields: Any) -> AsyncIterator[AsyncSandbox]:
        """A sandbox with a limit, or a test that ends here because the host cannot hold it and says so."""
        spec = self.spec(provider, **fields)
        enforced = await provider.enforcement(spec)
        for field in fields:
            if not enforced[field].by:
                with pytest.raises(Unsupported, match=field):
                    await AsyncSandbox.create(spec, provider)
                pytest.skip(f"{field} cannot be held here, and was refused: {enforced[field].why_not}")
        async with self.box(provider, **fields) as sandbox:
            yield sandbox

    async def test_memory_is_held(self, provider: Provider) -> None:
        async with self._limited(provider, memory=64 * _MIB) as sandbox:
            try:
                if not self.simulated:
                    # tail keeps all of a line that does not end in memory
                    result = await sandbox.exec("head -c 200000000 /dev/zero | tail -n 1 | wc -c", timeout_s=20)
                    assert result.text.strip() != "200000000"
                await sandbox.ping()
            except (AgentError, NotFound):
                # where what is largest takes long to die, the kernel takes another process, and that may be the first

                async def ended() -> bool:
                    status = (await provider.discover()).get(sandbox.id)
                    if status is None:
                        return self.memory_may_end_box
                    return status.state is BoxState.DEAD and (self.memory_may_end_box or status.out_of_memory)

                await eventually(ended, "the box ends for want of memory")

    @pytest.mark.needs_real_unix
    async def test_processes_are_held(self, provider: Provider) -> None:
        async with self._limited(provider, pids=20) as sandbox:
            result = await sandbox.exec("for i in $(seq 40); do sleep 1000 & done; echo all", timeout_s=10)
            assert not result.ok or b"all" not in result.stdout or result.stderr
            await sandbox.ping()

    async def test_processors_are_held(self, provider: Provider) -> None:
        async with self._limited(provider, cpus=0.2) as sandbox:
            if not self.simulated:
                spin = "while :; do :; done & p=$!; sleep 2; kill $p; wait; times"
                result = await sandbox.exec(["sh", "-c", spin], timeout_s=30)
                minutes, seconds = re.findall(r"(\d+)m([\d.]+)s", result.text)[2]
                assert int(minutes) * 60 + float(seconds) < 1.0

    async def test_without_a_network_there_is_only_loopback(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        if not self.simulated:
            found = (await sandbox.exec(["cat", "/proc/net/dev"])).text.splitlines()[2:]
            assert {line.partition(":")[0].strip() for line in found} <= {"lo", "tunl0", "sit0", "ip6tnl0"}
            routes = (await sandbox.exec(["cat", "/proc/net/route"])).text.splitlines()[1:]
            assert routes == []

    async def test_the_disk_is_held(self, provider: Provider) -> None:
        async with self._limited(provider, disk=16 * _MIB) as sandbox:
            with pytest.raises(DiskFull):
                await sandbox.files.write("too-big", bytes(32 * _MIB))
            assert not await sandbox.files.exists("too-big")
            await sandbox.files.write("small", b"still room")

    async def test_every_limit_says_how_it_is_held_or_why_not(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        assert {"memory", "pids", "cpus", "disk"} <= set(sandbox.enforced)
        for field, enforcement in sandbox.enforced.items():
            assert bool(enforcement.by) != bool(enforcement.why_not), field

    async def test_what_is_refused_leaves_nothing(self, provider: Provider) -> None:
        before = await self.on_host()
        for spec in self.refused(provider):
            with pytest.raises(Unsupported):
                await AsyncSandbox.create(spec, provider)
        assert await self.on_host() == before

    def refused(self, provider: Provider) -> list[Spec]:
        """Specs with a field that this provider never honours."""
        return []

    async def test_verbs_that_are_not_declared_are_not_there(self, provider: Provider) -> None:
        for capability, verbs in VERBS.items():
            for verb in verbs:
                assert hasattr(provider, verb) == (capability in provider.capabilities)
