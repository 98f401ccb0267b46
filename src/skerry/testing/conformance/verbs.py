"""What only some providers can: a verb that is declared does what the seam says, and one that is not is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from skerry.errors import Conflict, FileError, NotFound, SkerryError, Unsupported
from skerry.model.spec import new_id
from skerry.providers.base import OPTIONAL_FIELDS, VERBS, BoxChange, BoxState, Capability, Provider, Volume
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite, eventually

_FROZEN_S = 0.3
Check = Callable[[Any, Provider, Any], Awaitable[None]]
_SAMPLES: dict[str, object] = {
    "image": "debian",
    "root": "/",
    "runtime": "runsc",
    "target": "member",
    "group": "members",
    "writable_root": True,
    "admin": True,
    "data": True,
    "cache": "read",
    "cache_paths": {"own": "/opt/own"},
    "snapshot": "one",
    "sleep_after_s": 60,
}


def _unique(prefix: str) -> str:
    return f"{prefix}-{new_id()[:8]}"


def _declared(capability: Capability, *honours: str) -> Callable[[Check], Callable[[Any, Provider], Awaitable[None]]]:
    """Run a check where a capability is declared (and fields are honoured); elsewhere its verbs must not be there."""

    def decorate(check: Check) -> Callable[[Any, Provider], Awaitable[None]]:
        async def run(suite: Any, provider: Provider) -> None:
            if capability not in provider.capabilities:
                assert not [verb for verb in VERBS[capability] if hasattr(provider, verb)]
            elif provider.honours.issuperset(honours):
                await check(suite, provider, provider)

        return run

    return decorate


class VerbTests(Suite):
    keeps_files_on_stop = True
    """False for a provider whose work folder is in memory, and gone with the box's processes."""

    async def _expect(self, provider: Provider, sandbox: AsyncSandbox, state: BoxState) -> None:
        assert (await provider.discover())[sandbox.id].state is state

    async def test_a_field_that_is_not_honoured_is_refused(self, provider: Provider) -> None:
        before = await self.on_host()
        for field in OPTIONAL_FIELDS - provider.honours:
            fields = {field: _SAMPLES[field]} | ({"cache": "read"} if field == "cache_paths" else {})
            with pytest.raises(Unsupported, match=field.partition("_")[0]):
                await AsyncSandbox.create(self.spec(provider, **fields), provider)
        assert await self.on_host() == before

    # stop and start

    @_declared(Capability.STOP)
    async def test_stop_ends_the_processes_and_start_finds_the_files(self, provider: Provider, verbs: Any) -> None:
        async with self.box(provider, env={"ONE": "1"}) as sandbox:
            await sandbox.files.write("kept", "work")
            if "data" in provider.honours:
                await sandbox.files.write("/.data/kept", "data")
            await sandbox.start(["sleep", "1000"], background=True)
            await sandbox.close()
            await verbs.stop(sandbox.id)
            await self._expect(provider, sandbox, BoxState.STOPPED)
            await verbs.stop(sandbox.id)
            with pytest.raises(SkerryError):
                await sandbox.ping()
            again = msgspec.structs.replace(sandbox.spec, env={"TWO": "2"})
            await verbs.start(sandbox.id, again)
            await self._expect(provider, sandbox, BoxState.RUNNING)
            assert (await sandbox.exec('echo "$TWO"')).stdout == b"2\n"
            assert await sandbox.processes.list() == []
            if self.keeps_files_on_stop:
                assert await sandbox.files.read_text("kept") == "work"
            if "data" in provider.honours:
                assert await sandbox.files.read_text("/.data/kept") == "data"

    @_declared(Capability.STOP)
    async def test_a_box_that_was_started_again_ends_when_its_time_is_over(
        self, provider: Provider, verbs: Any
    ) -> None:
        async with self.box(provider) as sandbox:
            await verbs.stop(sandbox.id)
            await verbs.start(sandbox.id, msgspec.structs.replace(sandbox.spec, lifetime_s=0.5))
            await self.expect_end(provider, sandbox)

    @_declared(Capability.STOP)
    async def test_a_stopped_box_is_destroyed(self, provider: Provider, verbs: Any) -> None:
        before = await self.on_host()
        async with self.box(provider) as sandbox:
            await verbs.stop(sandbox.id)
        assert await self.on_host() == before

    # pause and resume

    @_declared(Capability.PAUSE)
    async def test_pause_freezes_and_resume_goes_on(self, provider: Provider, verbs: Any) -> None:
        async with self.box(provider) as sandbox:
            process = await sandbox.start(["sleep", "1000"], background=True)
            await verbs.pause(sandbox.id)
            await verbs.pause(sandbox.id)
            await self._expect(provider, sandbox, BoxState.PAUSED)
            answer = asyncio.ensure_future(sandbox.ping())
            done, _ = await asyncio.wait([answer], timeout=_FROZEN_S)
            assert not done, "a frozen box does not answer"
            await verbs.resume(sandbox.id)
            await answer
            await self._expect(provider, sandbox, BoxState.RUNNING)
            assert [each.process for each in await sandbox.processes.list() if each.running] == [process.number]

    @_declared(Capability.PAUSE)
    async def test_a_paused_box_is_destroyed(self, provider: Provider, verbs: Any) -> None:
        before = await self.on_host()
        async with self.box(provider) as sandbox:
            await sandbox.start(["sleep", "1000"], background=True)
            await verbs.pause(sandbox.id)
        assert await self.on_host() == before

    # memory in files

    @_declared(Capability.MEMORY)
    async def test_a_box_that_sleeps_runs_nothing_and_goes_on(self, provider: Provider, verbs: Any) -> None:
        async with self.box(provider) as sandbox:
            await sandbox.files.write("kept", "work")
            process = await sandbox.start(["sleep", "1000"], background=True)
            await sandbox.close()
            await verbs.sleep(sandbox.id)
            await verbs.sleep(sandbox.id)
            await self._expect(provider, sandbox, BoxState.ASLEEP)
            with pytest.raises(SkerryError):
                await sandbox.ping()
            await verbs.resume(sandbox.id)
            await self._expect(provider, sandbox, BoxState.RUNNING)
            assert await sandbox.files.read_text("kept") == "work"
            assert [each.process for each in await sandbox.processes.list() if each.running] == [process.number]

    @_declared(Capability.MEMORY, "data")
    async def test_a_box_that_sleeps_is_stopped_without_a_loss(self, provider: Provider, verbs: Any) -> None:
        async with self.box(provider) as sandbox:
            await sandbox.files.write("kept", "work")
            await sandbox.close()
            await verbs.sleep(sandbox.id)
            await verbs.stop(sandbox.id)
            await self._expect(provider, sandbox, BoxState.STOPPED)
            await verbs.start(sandbox.id, sandbox.spec)
            assert await sandbox.files.read_text("kept") == "work"

    @_declared(Capability.MEMORY)
    async def test_a_sleeping_box_is_destroyed(self, provider: Provider, verbs: Any) -> None:
        before = await self.on_host()
        async with self.box(provider) as sandbox:
            await sandbox.close()
            await verbs.sleep(sandbox.id)
        assert await self.on_host() == before

    @_declared(Capability.MEMORY, "snapshot")
    async def test_boxes_go_on_from_a_snapshot_with_memory(self, provider: Provider, verbs: Any) -> None:
        name = _unique("conformance")
        async with self.box(provider) as sandbox:
            await sandbox.files.write("kept", "work")
            process = await sandbox.start(["sleep", "1000"], background=True)
            taken = await verbs.snapshot_memory(sandbox.id, name)
            try:
                assert (taken.name, taken.sandbox, taken.memory) == (name, sandbox.id, True)
                assert taken in await verbs.snapshots()
                with pytest.raises(Conflict):
                    await verbs.snapshot_memory(sandbox.id, name)
                drawn = set()
                async with self.box(provider, snapshot=name) as one, self.box(provider, snapshot=name) as other:
                    for each in (sandbox, one, other):
                        assert await each.files.read_text("kept") == "work"
                        drawn.add((await each.exec(["head", "-c", "32", "/dev/urandom"])).stdout)
                        running = [found.process for found in await each.processes.list() if found.running]
                        assert running == [process.number]
                assert len(drawn) == 3
            finally:
                await verbs.remove_snapshot(name)

    # snapshots

    @_declared(Capability.SNAPSHOT)
    async def test_a_snapshot_brings_the_files_back_in_another_box(self, provider: Provider, verbs: Any) -> None:
        name = _unique("conformance")
        async with self.box(provider) as sandbox:
            await sandbox.files.write("folder/f", "before", mode=0o640)
            taken = await verbs.snapshot(sandbox.id, name)
            assert (taken.name, taken.sandbox) == (name, sandbox.id)
            await sandbox.files.write("folder/f", "after")
            with pytest.raises(Conflict):
                await verbs.snapshot(sandbox.id, name)
        try:
            assert name in {each.name for each in await verbs.snapshots()}
            async with self.box(provider, snapshot=name) as copy:
                assert await copy.files.read_text("folder/f") == "before"
                assert (await copy.files.stat("folder/f")).mode & 0o777 == 0o640
                await copy.files.write("folder/f", "changed")
                with pytest.raises(Conflict):
                    await verbs.remove_snapshot(name)
            async with self.box(provider, snapshot=name) as copy:
                assert await copy.files.read_text("folder/f") == "before"
        finally:
            await verbs.remove_snapshot(name)
        assert name not in {each.name for each in await verbs.snapshots()}
        with pytest.raises(NotFound):
            await verbs.remove_snapshot(name)

    @_declared(Capability.SNAPSHOT)
    async def test_a_snapshot_that_is_not_there_makes_no_box(self, provider: Provider, verbs: Any) -> None:
        before = await self.on_host()
        with pytest.raises(NotFound):
            await AsyncSandbox.create(self.spec(provider, snapshot="there-is-none"), provider)
        assert await self.on_host() == before

    # watch

    @_declared(Capability.WATCH)
    async def test_watch_tells_of_every_box_and_then_of_every_change(self, provider: Provider, verbs: Any) -> None:
        seen: list[BoxChange] = []

        async def watch() -> None:
            async for change in verbs.watch():
                seen.append(change)  # noqa: PERF401  what is seen is looked at meanwhile

        async def told(id: str, state: BoxState | None) -> None:
            async def is_told() -> bool:
                return any(each.id == id and (each.status and each.status.state) == state for each in seen)

            await eventually(is_told, f"watch tells that {id} is {state or 'gone'}")

        async with self.box(provider) as first:
            watching = asyncio.create_task(watch())
            try:
                await told(first.id, BoxState.RUNNING)
                second = await AsyncSandbox.create(self.spec(provider), provider)
                await told(second.id, BoxState.RUNNING)
                if Capability.STOP in provider.capabilities:
                    await verbs.stop(second.id)
                    await told(second.id, BoxState.STOPPED)
                await second.destroy(volumes=True)
                await told(second.id, None)
            finally:
                watching.cancel()
                await asyncio.wait([watching])

    # volumes

    async def _volumes(self, verbs: Any, **wanted: object) -> list[Volume]:
        """Those with these fields."""
        found = await verbs.volumes(sizes=True)
        return [each for each in found if all(getattr(each, key) == value for key, value in wanted.items())]

    @_declared(Capability.VOLUMES, "data")
    async def test_data_outlives_a_box_and_is_found_by_its_name(self, provider: Provider, verbs: Any) -> None:
        name, project, other = _unique("n"), _unique("p"), _unique("q")
        async with self.box(provider, name=name, project=project, volumes=False) as first:
            await first.files.write("/.data/f", "kept")
            (volume,) = await self._volumes(verbs, kind="data", project=project)
            assert (volume.label, volume.in_use) == (name, True)
            with pytest.raises(Conflict):
                await verbs.remove_volume(volume.name)
        assert [each.in_use for each in await self._volumes(verbs, name=volume.name)] == [False]
        async with self.box(provider, name=name, project=other) as stranger:
            assert not await stranger.files.exists("/.data/f")
        async with self.box(provider, name=name, project=project) as second:
            assert await second.files.read_text("/.data/f") == "kept"
        assert await self._volumes(verbs, project=project) == []
        with pytest.raises(NotFound):
            await verbs.remove_volume(volume.name)

    @_declared(Capability.VOLUMES, "data")
    async def test_data_without_a_name_is_a_boxs_own(self, provider: Provider, verbs: Any) -> None:
        project = _unique("p")
        async with self.box(provider, project=project, volumes=False) as first:
            await first.files.write("/.data/f", "mine")
            async with self.box(provider, project=project) as second:
                assert not await second.files.exists("/.data/f")
        (volume,) = await self._volumes(verbs, project=project)
        assert volume.sandbox == first.id
        await verbs.remove_volume(volume.name)
        async with self.box(provider, project=project, data=False) as without:
            if await without.files.exists("/.data"):  # an image may have the folder, and nobody can write there
                with pytest.raises(FileError):
                    await without.files.write("/.data/f", "lost")
            assert await self._volumes(verbs, project=project) == []

    @_declared(Capability.VOLUMES, "data")
    async def test_volumes_go_with_a_box_that_is_gone_already(self, provider: Provider, verbs: Any) -> None:
        """Whoever removed the box may have died before the volumes."""
        project = _unique("p")
        async with self.box(provider, project=project, volumes=False) as sandbox:
            pass
        assert await self._volumes(verbs, project=project)
        await provider.destroy(sandbox.id, volumes=True)
        assert await self._volumes(verbs, project=project) == []

    @_declared(Capability.VOLUMES, "cache", "cache_paths")
    async def test_caches_are_shared_by_a_project_and_by_nobody_else(self, provider: Provider, verbs: Any) -> None:
        project, other = _unique("p"), _unique("q")
        mine: dict[str, Any] = {"project": project, "cache": "write", "cache_paths": {"own": "/opt/own"}}
        try:
            async with self.box(provider, **mine) as first:
                assert (await first.exec('echo "$PIP_CACHE_DIR"')).text.strip() == "/.cache/pip"
                await first.files.write("/.cache/pip/f", "fetched")
                await first.files.write("/opt/own/f", "built")
            async with self.box(provider, **mine) as second:
                assert await second.files.read_text("/.cache/pip/f") == "fetched"
                assert await second.files.read_text("/opt/own/f") == "built"
            async with self.box(provider, project=other, cache="write") as stranger:
                assert not await stranger.files.exists("/.cache/pip/f")
            async with self.box(provider, project=project) as without:
                assert not await without.files.exists("/.cache/pip")
            (pip,) = await self._volumes(verbs, kind="cache", project=project, label="pip")
            assert pip.size is None or pip.size > 0
        finally:
            await self._remove_caches(verbs, project, other)

    @_declared(Capability.VOLUMES, "cache")
    async def test_a_cache_that_is_only_read_is_not_written(self, provider: Provider, verbs: Any) -> None:
        project = _unique("p")
        try:
            async with self.box(provider, project=project, cache="write") as writer:
                await writer.files.write("/.cache/npm/f", "fetched")
            async with self.box(provider, project=project, cache="read") as reader:
                assert await reader.files.read_text("/.cache/npm/f") == "fetched"
                for path in ("/.cache/npm/f", "/.cache/npm/new", "/.cache/pip/new"):
                    with pytest.raises(FileError):
                        await reader.files.write(path, "poison")
                assert not (await reader.exec("rm /.cache/npm/f")).ok
                assert await reader.files.read_text("/.cache/npm/f") == "fetched"
        finally:
            await self._remove_caches(verbs, project)

    @_declared(Capability.VOLUMES, "cache", "cache_paths")
    async def test_a_projects_own_volumes_come_without_the_tools_caches(self, provider: Provider, verbs: Any) -> None:
        mine: dict[str, Any] = {"project": _unique("p"), "cache": "own", "cache_paths": {"mine": "/opt/mine"}}
        try:
            async with self.box(provider, **mine) as first:
                await first.files.write("/opt/mine/f", "kept")
                assert not await first.files.exists("/.cache/pip")
            async with self.box(provider, **mine) as second:
                assert await second.files.read_text("/opt/mine/f") == "kept"
            assert await self._volumes(verbs, kind="cache", project=mine["project"]) == []
        finally:
            for volume in await self._volumes(verbs, kind="own", project=mine["project"]):
                await verbs.remove_volume(volume.name)

    async def _remove_caches(self, verbs: Any, *projects: str) -> None:
        for project in projects:
            for volume in await self._volumes(verbs, kind="cache", project=project):
                await verbs.remove_volume(volume.name)

    # logs

    @_declared(Capability.LOGS)
    async def test_the_log_of_a_box_ends_and_when_followed_ends_with_the_box(
        self, provider: Provider, verbs: Any
    ) -> None:
        async with self.box(provider) as sandbox:
            async with asyncio.timeout(10):
                whole = [chunk async for chunk in verbs.logs(sandbox.id)]
                assert b"".join([chunk async for chunk in verbs.logs(sandbox.id, tail=0)]) == b""
            assert all(isinstance(chunk, bytes) for chunk in whole)

            async def follow() -> bytes:
                return b"".join([chunk async for chunk in verbs.logs(sandbox.id, follow=True)])

            following = asyncio.create_task(follow())
            await sandbox.ping()
        async with asyncio.timeout(10):
            assert (await following).startswith(b"".join(whole))
