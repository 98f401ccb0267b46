"""Names, idempotency keys, limits, and sandboxes that were made elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from skerry.errors import (
    Conflict,
    LimitReached,
    NotFound,
    SkerryError,
    StoreUnavailable,
)
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

from .world import ENDED, config_of, in_agreement

# names, keys and limits


async def test_a_name_is_free_again_when_its_sandbox_has_ended(manager: AsyncSandboxManager) -> None:
    first = await manager.create(name="web")
    with pytest.raises(Conflict, match=first.id):
        await manager.create(name="web")
    await manager.create(name="web", project="other")
    await manager.destroy(first.id)
    assert (await manager.create(name="web")).id != first.id


async def test_the_same_key_gives_the_same_sandbox(manager: AsyncSandboxManager, mock: Mock) -> None:
    made = await asyncio.gather(*(manager.create(key="order 7", memory="64M") for _ in range(10)))
    assert len({sandbox.id for sandbox in made}) == 1
    assert len(await mock.discover()) == 1
    assert (await made[-1].exec("echo ok")).ok
    with pytest.raises(Conflict):
        await manager.create(key="order 7", memory="128M")


async def test_a_key_can_be_used_again_after_its_sandbox_ended(manager: AsyncSandboxManager) -> None:
    first = await manager.create(key="k")
    await manager.destroy(first.id)
    assert (await manager.create(key="k")).id != first.id


async def test_a_second_create_by_key_is_told_of_the_first_one_s_failure(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    mock.faults.fail_create()
    first, second = await asyncio.gather(manager.create(key="k"), manager.create(key="k"), return_exceptions=True)
    assert isinstance(first, SkerryError)
    assert isinstance(second, SkerryError | AsyncSandbox)
    await in_agreement(manager, mock)


async def test_who_got_no_answer_asks_again_by_the_key(
    manager: AsyncSandboxManager, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry took the create and went away before it could say so."""
    reserve, get = store.reserve, store.get

    async def answer_is_lost(*args: object, **options: object) -> object:
        await reserve(*args, **options)  # type: ignore[arg-type]
        raise StoreUnavailable("the connection broke")

    async def is_away(*args: object) -> object:
        raise StoreUnavailable("the connection broke")

    monkeypatch.setattr(store, "reserve", answer_is_lost)
    monkeypatch.setattr(store, "get", is_away)
    with pytest.raises(StoreUnavailable):
        await manager.create(key="k")
    monkeypatch.setattr(store, "reserve", reserve)
    monkeypatch.setattr(store, "get", get)
    async with asyncio.timeout(5):
        with suppress(NotFound, Conflict):  # the first one is cleared away, and that is told
            await manager.create(key="k")
        assert (await (await manager.create(key="k")).exec("true")).ok
    assert len(await mock.discover()) == await manager.count() == 1


async def test_a_create_by_the_key_of_a_lost_sandbox_does_not_wait_for_ever(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    first = await manager.create(key="k")
    mock.faults.lost_box(first.id)
    await manager.reconcile()
    async with asyncio.timeout(2):
        with suppress(SkerryError):  # a clear error is an answer too
            assert (await (await manager.create(key="k")).exec("true")).ok


async def test_as_many_creates_at_once_as_one_likes_do_not_pass_the_limit(
    tmp_path: Path, store: Store, mock: Mock
) -> None:
    config = config_of(tmp_path, max_sandboxes=7)
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        results = await asyncio.gather(*(manager.create() for _ in range(30)), return_exceptions=True)
        assert sum(isinstance(each, AsyncSandbox) for each in results) == 7
        assert all(isinstance(each, AsyncSandbox | LimitReached) for each in results)
        assert len(await mock.discover()) == 7
        with pytest.raises(LimitReached, match="7"):
            await manager.create()
        await manager.destroy((await manager.list())[0].id)
        await manager.create()


async def test_so_many_boots_run_at_once_and_no_more(tmp_path: Path, store: Store, mock: Mock) -> None:
    booting, most = 0, 0
    create = mock.create

    async def count(id: object, spec: object) -> None:
        nonlocal booting, most
        booting += 1
        most = max(most, booting)
        await asyncio.sleep(0.005)
        await create(id, spec)  # type: ignore[arg-type]
        booting -= 1

    mock.create = count  # type: ignore[method-assign, assignment]
    config = config_of(tmp_path, max_boots=2)
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        await asyncio.gather(*(manager.create() for _ in range(12)))
        assert most == 2


# taking in what was made elsewhere


async def test_a_registered_sandbox_is_like_any_other(manager: AsyncSandboxManager, mock: Mock) -> None:
    own = await AsyncSandbox.create(Spec(provider="mock", name="guest"), mock)
    taken = await manager.register(own)
    assert (await manager.record("guest")).state is State.READY
    assert (await taken.exec("echo in")).stdout == b"in\n"
    await taken.destroy()
    assert not await mock.discover()


async def test_a_register_that_is_refused_hands_the_sandbox_back(tmp_path: Path, store: Store, mock: Mock) -> None:
    config = config_of(tmp_path, max_sandboxes=1)
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        await manager.create(name="holder")
        own = await AsyncSandbox.create(Spec(provider="mock"), mock)
        with pytest.raises(LimitReached):
            await manager.register(own)
        assert (await own.exec("echo still mine")).ok
        assert await manager.count(ENDED) == 1


async def test_a_register_of_a_taken_name_or_twice_is_refused(manager: AsyncSandboxManager, mock: Mock) -> None:
    await manager.create(name="web")
    own = await AsyncSandbox.create(Spec(provider="mock", name="web"), mock)
    with pytest.raises(Conflict):
        await manager.register(own)
    other = await AsyncSandbox.create(Spec(provider="mock"), mock)
    await manager.register(other)
    with pytest.raises(Conflict):
        await manager.register(other)
    assert (await own.exec("true")).ok
    await own.destroy()


async def test_a_register_of_a_provider_that_the_manager_does_not_know_leaves_no_record(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    class Foreign(Mock):
        name = "foreign"

    own = await AsyncSandbox.create(Spec(provider="foreign"), Foreign())
    with pytest.raises(SkerryError):
        await manager.register(own)
    assert await manager.count() == 0
    assert (await own.exec("true")).ok
    await own.destroy()


async def test_a_reconcile_while_a_sandbox_is_registered_leaves_it_alone(
    manager: AsyncSandboxManager, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = await AsyncSandbox.create(Spec(provider="mock"), mock)
    reserve = store.reserve

    async def reserve_then_reconcile(*args: object, **options: object) -> object:
        reserved = await reserve(*args, **options)  # type: ignore[arg-type]
        await manager.reconcile()
        return reserved

    monkeypatch.setattr(store, "reserve", reserve_then_reconcile)
    await manager.register(own)
    assert (await own.exec("true")).ok
    assert (await manager.record(own.id)).state is State.READY


async def test_a_register_that_the_registry_fails_leaves_the_sandbox_to_its_caller(
    manager: AsyncSandboxManager, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = await AsyncSandbox.create(Spec(provider="mock"), mock)

    async def fail(*args: object, **options: object) -> object:
        raise StoreUnavailable("the connection broke")

    with monkeypatch.context() as broken:
        broken.setattr(store, "change", fail)
        with suppress(StoreUnavailable):
            await manager.register(own)
    await manager.reconcile()
    assert (await own.exec("true")).ok


async def test_a_sandbox_that_was_made_without_a_manager_is_not_its_to_destroy(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    """`with Sandbox()` in one program, a reconcile in another: both on the same host."""
    own = await AsyncSandbox.create(Spec(provider="mock"), mock)
    await manager.reconcile()
    assert (await own.exec("true")).ok
    await manager.register(own)
    await manager.reconcile()
    assert (await own.exec("true")).ok
