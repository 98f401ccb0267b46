from __future__ import annotations

import asyncio
import errno
import gc
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping

import pytest

from skerry.aio import run_to_end
from skerry.errors import Conflict, CreateFailed, ProviderError, Unsupported, WrongState
from skerry.manager.create import create_or_nothing, is_left_behind
from skerry.manager.providers import admit
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import TRANSITIONS, State, move
from skerry.net.stream import Stream
from skerry.providers.base import BoxStatus, Capability, Enforcement, Isolation, Provider
from skerry.sandbox.sandbox import AsyncSandbox


class FakeProvider(Provider):
    """Boxes are entries of a set; `before` is awaited at each step of each verb and may fail or hang."""

    name = "fake"
    isolation = Isolation.NONE

    def __init__(self, before: Callable[[str], Awaitable[None]] | None = None) -> None:
        self.boxes: set[SandboxId] = set()
        self.steps: list[str] = []
        self._before = before

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._before is not None:
            await self._before(name)

    async def check(self) -> None:
        return None

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        await self._step("enforcement")
        return {"memory": Enforcement(by="counting"), "disk": Enforcement(why_not="there is no quota here")}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        await self._step("create begins")
        self.boxes.add(id)
        await self._step("create has a box")
        await asyncio.sleep(0)
        await self._step("create ends")

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        await self._step("destroy begins")
        self.boxes.discard(id)
        await asyncio.sleep(0)
        await self._step("destroy ends")

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {}

    async def dial(self, id: SandboxId) -> Stream:
        raise NotImplementedError


# states


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(targets <= set(State) for targets in TRANSITIONS.values())


def test_the_table_is_as_it_was_decided() -> None:
    ways = {f"{a}>{b}" for a, targets in TRANSITIONS.items() for b in targets}
    assert "creating>ready" in ways
    assert {"ready>paused", "paused>ready", "ready>stopped", "stopped>ready", "ready>asleep", "asleep>ready"} <= ways
    assert not any(way.startswith("destroyed>") for way in ways)
    assert {way for way in ways if way.endswith(">creating")} == {
        "ready>creating", "paused>creating", "asleep>creating", "stopped>creating", "lost>creating"
    }, "made anew"  # fmt: skip
    assert all(f"{state}>destroyed" in ways for state in State if state is not State.DESTROYED)


@pytest.mark.parametrize("current", State)
@pytest.mark.parametrize("to", State)
def test_a_move_is_allowed_by_the_table_or_refused(current: State, to: State) -> None:
    if to is current or to in TRANSITIONS[current]:
        assert move(current, to) is to
    else:
        with pytest.raises(WrongState, match=f"{current}.*{to}"):
            move(current, to)


# create or nothing


async def test_a_box_that_comes_up_stays() -> None:
    provider, id = FakeProvider(), new_id()
    await create_or_nothing(provider, id, Spec())
    assert provider.boxes == {id}
    assert provider.steps[-1] == "create ends"


async def test_a_limit_that_can_be_held_is_admitted() -> None:
    assert (await admit(FakeProvider(), Spec.of(memory="64M")))["memory"].by == "counting"


class ReadsBack(FakeProvider):
    """What it finds of a box that is made is not always what it said before."""

    def __init__(self, **held: Enforcement) -> None:
        super().__init__()
        self.held = held

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:  # type: ignore[override]
        await super().create(id, spec)
        return self.held


async def test_what_was_read_back_of_a_box_is_what_is_told_of_its_limits() -> None:
    provider = ReadsBack(memory=Enforcement(by="a group that was seen"))
    sandbox = await AsyncSandbox.create(Spec.of(provider="fake"), provider)
    assert sandbox.enforced["memory"].by == "a group that was seen"
    assert sandbox.enforced["disk"].why_not


async def test_a_box_without_a_limit_that_was_asked_for_is_destroyed() -> None:
    provider = ReadsBack(memory=Enforcement(why_not="it is in no group"))
    with pytest.raises(Unsupported, match="it is in no group"):
        await create_or_nothing(provider, new_id(), Spec.of(memory="64M"))
    assert provider.boxes == set()
    await create_or_nothing(provider, new_id(), Spec())
    assert len(provider.boxes) == 1


async def test_a_limit_that_cannot_be_held_is_refused_before_anything_is_made() -> None:
    provider = FakeProvider()
    with pytest.raises(Unsupported, match="no quota") as caught:
        await admit(provider, Spec.of(disk="1G"))
    assert caught.value.field == "disk"
    assert provider.steps == ["enforcement"]


STEPS = ["create begins", "create has a box", "create ends"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [CreateFailed("no"), OSError("no"), asyncio.CancelledError()], ids=repr)
async def test_a_failure_at_any_step_leaves_nothing(step: str, error: BaseException) -> None:
    async def fail(name: str) -> None:
        if name == step:
            raise error

    provider = FakeProvider(fail)
    with pytest.raises(CreateFailed if isinstance(error, OSError) else type(error)):
        await create_or_nothing(provider, new_id(), Spec())
    assert provider.boxes == set()


@pytest.mark.parametrize("step", ["enforcement", *STEPS])
async def test_an_error_of_the_host_is_told_as_one_of_ours(step: str) -> None:
    async def fail(name: str) -> None:
        if name == step:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/no/such")

    with pytest.raises(CreateFailed, match="No such file or directory: '/no/such'"):
        await AsyncSandbox.create(Spec(), FakeProvider(fail))


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancellation_at_any_await_leaves_nothing_or_a_whole_box(turns: int) -> None:
    async def pause(_name: str) -> None:
        await asyncio.sleep(0)

    provider, id = FakeProvider(pause), new_id()
    task = asyncio.create_task(create_or_nothing(provider, id, Spec()))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert provider.boxes == ({id} if was_done else set())
    assert task.cancelled() != was_done


async def test_a_second_cancellation_does_not_stop_the_clearing() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hang(name: str) -> None:
        if name == "create ends":
            reached.set()
            await go_on.wait()

    provider = FakeProvider(hang)
    task = asyncio.create_task(create_or_nothing(provider, new_id(), Spec()))
    await reached.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.boxes == set()
    assert provider.steps[-1] == "destroy ends"


async def test_a_destroy_that_fails_does_not_hide_why_the_create_failed() -> None:
    async def fail(name: str) -> None:
        if name == "create has a box":
            raise CreateFailed("the first reason")
        if name == "destroy begins":
            raise ProviderError("the second reason")

    with pytest.raises(ProviderError) as caught:
        await create_or_nothing(FakeProvider(fail), new_id(), Spec())
    reasons = {str(caught.value), str(caught.value.__context__), str(caught.value.__cause__)}
    assert "the first reason" in reasons


async def test_what_could_not_be_undone_is_known_to_be_left_behind() -> None:
    async def fail(name: str) -> None:
        if name in ("create has a box", "destroy begins"):
            raise ProviderError(f"no {name}")

    with pytest.raises(ProviderError) as caught:
        await create_or_nothing(FakeProvider(fail), new_id(), Spec())
    assert is_left_behind(caught.value)
    assert not is_left_behind(CreateFailed("another"))


async def test_the_box_of_another_is_not_destroyed_because_its_id_was_taken() -> None:
    async def conflict(name: str) -> None:
        if name == "create begins":
            raise Conflict("that id is taken")

    provider, id = FakeProvider(conflict), new_id()
    provider.boxes.add(id)
    with pytest.raises(Conflict):
        await create_or_nothing(provider, id, Spec())
    assert provider.boxes == {id}


async def test_nor_is_it_when_we_are_cancelled_before_that_is_known() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def conflict(name: str) -> None:
        if name == "create begins":
            reached.set()
            await go_on.wait()
            raise Conflict("that id is taken")

    provider, id = FakeProvider(conflict), new_id()
    provider.boxes.add(id)
    task = asyncio.create_task(create_or_nothing(provider, id, Spec()))
    await reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert provider.boxes == {id}


# a provider object of the program's own


async def test_a_sandbox_of_an_own_provider_is_created_used_and_destroyed_in_a_registry_of_its_own() -> None:
    provider = FakeProvider()
    sandboxes = await asyncio.gather(*(AsyncSandbox.create(Spec(provider="fake"), provider) for _ in range(150)))
    assert provider.boxes == {sandbox.id for sandbox in sandboxes}, "no limit but the host's"
    again = AsyncSandbox.of_box(sandboxes[0].id, Spec(provider="fake"), provider)
    await again.destroy()
    await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
    await sandboxes[0].destroy()
    assert provider.boxes == set()
    assert {sandbox.state for sandbox in sandboxes} == {State.DESTROYED}


async def test_a_destroy_that_failed_can_be_repeated() -> None:
    fails = True

    async def fail(name: str) -> None:
        if name == "destroy begins" and fails:
            raise ProviderError("not now")

    provider = FakeProvider(fail)
    sandbox = await AsyncSandbox.create(Spec(provider="fake"), provider)
    with pytest.raises(ProviderError, match="not now"):
        await sandbox.destroy()
    fails = False
    await sandbox.destroy()
    assert provider.boxes == set()


@pytest.mark.parametrize("turns", range(24))
async def test_a_sandbox_whose_create_is_cancelled_at_any_await_is_not_there(turns: int) -> None:
    async def pause(_name: str) -> None:
        await asyncio.sleep(0)

    provider = FakeProvider(pause)
    task = asyncio.create_task(AsyncSandbox.create(Spec(provider="fake"), provider))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(provider.boxes) == was_done
    assert task.cancelled() != was_done


async def test_a_sandbox_that_is_dropped_leaves_no_task_and_no_open_registry() -> None:
    before = asyncio.all_tasks()
    provider = FakeProvider()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sandbox = await AsyncSandbox.create(Spec(provider="fake"), provider)
        dropped = weakref.ref(sandbox)
        del sandbox
        gc.collect()
    assert dropped() is None
    assert asyncio.all_tasks() == before


# run to end


async def test_work_runs_to_its_end_though_we_are_cancelled() -> None:
    done: list[int] = []

    async def work() -> int:
        for i in range(5):
            await asyncio.sleep(0)
            done.append(i)
        return 7

    task = asyncio.create_task(run_to_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [0, 1, 2, 3, 4]
    assert await run_to_end(work()) == 7


async def test_work_that_fails_fails() -> None:
    async def work() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await run_to_end(work())


async def test_a_timeout_around_work_to_be_ended_is_still_a_timeout() -> None:
    async def work() -> None:
        await asyncio.sleep(0.05)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_to_end(work())


# the seam


def test_what_is_declared_and_what_is_written_must_agree() -> None:
    with pytest.raises(TypeError, match="does not write start"):
        type("P", (FakeProvider,), {"capabilities": frozenset({Capability.STOP}), "stop": lambda self: None})
    with pytest.raises(TypeError, match="does not declare"):
        type("P", (FakeProvider,), {"logs": lambda self: None})
