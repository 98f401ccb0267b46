"""Templates are made once, kept as long as they are good, and never half."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.vm.base import Capabilities, Drive, Kernel, Machine
from skerry.vm.templates import TemplateStore, key_of

KEY = "a" * 32
WAIT_S = 20.0


class Builder:
    """Saves a machine of two small files, and counts how often."""

    def __init__(self) -> None:
        self.built = 0
        self.fails = False
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, into: Path) -> None:
        self.built += 1
        (into / "memory").write_bytes(b"m" * 1000)
        self.begun.set()
        await self.go_on.wait()
        if self.fails:
            raise ProviderError("it does not boot")
        (into / "state").write_text(f"number {self.built}")


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path)


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "templates").iterdir() if path.name != ".locks"}


async def test_a_template_is_made_once_and_found_again(store: TemplateStore, tmp_path: Path) -> None:
    build = Builder()
    made = await store.make(KEY, build, timeout_s=WAIT_S)
    assert (made.folder / "state").read_text() == "number 1"
    again = await store.make(KEY, build, timeout_s=WAIT_S)
    assert (build.built, again.made_at) == (1, made.made_at)
    assert TemplateStore(tmp_path).get(KEY) == made


async def test_of_many_who_want_the_same_one_builds_it(store: TemplateStore, tmp_path: Path) -> None:
    build, others = Builder(), [TemplateStore(tmp_path) for _ in range(5)]
    made = await asyncio.gather(*(each.make(KEY, build, timeout_s=WAIT_S) for each in (store, *others)))
    assert build.built == 1
    assert len({each.made_at for each in made}) == 1


async def test_whoever_waits_too_long_is_told_who_is_at_it(store: TemplateStore, tmp_path: Path) -> None:
    build = Builder()
    build.go_on.clear()
    building = asyncio.create_task(store.make(KEY, build, timeout_s=WAIT_S))
    await build.begun.wait()
    with pytest.raises(ProviderError, match="another process"):
        await TemplateStore(tmp_path).make(KEY, build, timeout_s=0)
    assert store.get(KEY) is None
    build.go_on.set()
    await building


async def test_a_failed_build_leaves_nothing_and_the_next_one_tries(store: TemplateStore, tmp_path: Path) -> None:
    build = Builder()
    build.fails = True
    with pytest.raises(ProviderError, match="does not boot"):
        await store.make(KEY, build, timeout_s=WAIT_S)
    assert left(tmp_path) == set()
    build.fails = False
    assert (await store.make(KEY, build, timeout_s=WAIT_S)).key == KEY


async def test_a_cancelled_build_leaves_nothing(store: TemplateStore, tmp_path: Path) -> None:
    build = Builder()
    build.go_on.clear()
    building = asyncio.create_task(store.make(KEY, build, timeout_s=WAIT_S))
    await build.begun.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert left(tmp_path) == set()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "more", "unreadable"])
async def test_a_template_that_was_touched_is_made_again(store: TemplateStore, damage: str) -> None:
    build = Builder()
    folder = (await store.make(KEY, build, timeout_s=WAIT_S)).folder
    memory = folder / "memory"
    if damage == "cut":
        os.truncate(memory, 10)
    elif damage == "changed":
        with open(memory, "r+b") as file:
            file.write(b"x")
    elif damage == "gone":
        memory.unlink()
    elif damage == "more":
        (folder / "another").touch()
    else:
        (folder / "template.json").write_text("{")
    assert store.get(KEY) is None
    assert ((await store.make(KEY, build, timeout_s=WAIT_S)).folder / "state").read_text() == "number 2"


async def test_only_the_one_that_was_useless_is_discarded(store: TemplateStore, tmp_path: Path) -> None:
    build = Builder()
    first = await store.make(KEY, build, timeout_s=WAIT_S)
    await store.discard(first, timeout_s=WAIT_S)
    assert left(tmp_path) == set()
    second = await store.make(KEY, build, timeout_s=WAIT_S)
    await store.discard(first, timeout_s=WAIT_S)
    assert store.get(KEY) == second


async def test_what_nobody_uses_any_more_is_swept(store: TemplateStore, tmp_path: Path) -> None:
    made = await store.make(KEY, Builder(), timeout_s=WAIT_S)
    assert await store.sweep() == []
    os.utime(made.folder / "template.json", (0, 0))
    assert store.get(KEY) == made, "whoever takes it uses it"
    assert await store.sweep() == []
    os.utime(made.folder / "template.json", (0, 0))
    other = "b" * 32
    await store.make(other, Builder(), timeout_s=WAIT_S)
    assert left(tmp_path) == {other}


def test_the_key_changes_with_whatever_a_saved_machine_depends_on() -> None:
    kernel = Kernel(key="k", version="6", own=False, vmlinuz=Path(), vmlinux=Path(), initrd=Path())
    can = Capabilities(accelerator="tcg", version="7.2", snapshots=True, shares_memory=True)
    disk = Drive(name="disk", path="/somewhere")
    machine = Machine(kernel=kernel, drives=(disk,))

    def key(machine: Machine = machine, can: Capabilities = can, name: str = "qemu", image: str = "i") -> str:
        return key_of(name, can, machine, image)

    def but(**fields: object) -> Machine:
        return Machine(**{**{name: getattr(machine, name) for name in Machine.__struct_fields__}, **fields})  # type: ignore[arg-type]

    others = [
        key(but(memory_mib=512)),
        key(but(vcpus=4)),
        key(but(network="user")),
        key(but(boot_args=("x",))),
        key(but(drives=(disk, disk))),
        key(but(drives=(Drive(name="disk", path="/somewhere", format="qcow2"),))),
        key(but(kernel=Kernel(key="l", version="6", own=False, vmlinuz=Path(), vmlinux=Path(), initrd=Path()))),
        key(can=Capabilities(accelerator="kvm", version="7.2", snapshots=True, shares_memory=True)),
        key(can=Capabilities(accelerator="tcg", version="8.0", snapshots=True, shares_memory=True)),
        key(name="firecracker"),
        key(image="j"),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key(but(drives=(Drive(name="disk", path="elsewhere"),))) == key()
    assert key(but(saveable=True)) == key()
