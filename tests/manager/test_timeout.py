"""The time of operations that are given none: the sandbox's own, else the configuration's."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import CallTimeout, InvalidSpec
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.pool.claim import key_of
from skerry.providers.mock import Mock

from .world import config_of


async def test_a_command_without_a_time_has_that_of_its_sandbox(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(timeout="5s")
    result = await sandbox.exec(["sleep", "1000"])
    assert (result.timed_out, round(result.duration_s)) == (True, 5)
    assert (await sandbox.run_code("sh", "sleep 1000")).timed_out
    assert (await manager.execute(sandbox.id, ["sleep", "1000"])).timed_out


@pytest.mark.parametrize("timeout_s", [0, 100])
async def test_a_time_that_is_given_counts_and_0_is_any(manager: AsyncSandboxManager, timeout_s: float) -> None:
    sandbox = await manager.create(timeout=5)
    assert (await sandbox.exec(["sleep", "50"], timeout_s=timeout_s)).ok


async def test_a_process_that_is_started_has_no_time(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(timeout=5)
    async with await sandbox.start(["sleep", "50"]) as process:
        assert (await process.wait()).ok


@pytest.mark.parametrize(
    "act",
    ["read", "write", "stat", "list", "remove", "make_dir", "upload", "download", "write_tar"],
)
async def test_a_call_about_files_raises_when_the_time_is_over(
    manager: AsyncSandboxManager, mock: Mock, tmp_path: Path, act: str
) -> None:
    sandbox = await manager.create(timeout=0.1)
    await sandbox.ping()
    mock.faults.hang(sandbox.id)
    (tmp_path / "folder").mkdir()
    with (tmp_path / "empty").open("wb+") as empty:
        arguments: dict[str, tuple[object, ...]] = {
            "write": ("f", b"data"),
            "upload": (tmp_path / "folder", "f"),
            "download": ("f", tmp_path / "f"),
            "write_tar": ("f", empty),
        }
        with pytest.raises(CallTimeout, match=r"longer than 0\.1 s, as the sandbox's timeout says"):
            await getattr(sandbox.files, act)(*arguments.get(act, ("f",)))


async def test_the_configuration_has_the_time_of_sandboxes_that_are_told_none(tmp_path: Path, mock: Mock) -> None:
    async with AsyncSandboxManager(config_of(tmp_path, timeout="7s"), providers={"mock": mock}) as manager:
        assert (await manager.create()).spec.timeout_s == 7
        assert (await manager.create(timeout=None)).spec.timeout_s == 0
        assert (await manager.create(timeout="1m")).spec.timeout_s == 60
        await manager.destroy_all()


def test_a_time_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="timeout_s"):
        Spec.of(timeout=-1)


def test_it_is_no_part_of_a_warm_box() -> None:
    assert key_of(Spec.of(timeout=5)) == key_of(Spec())
