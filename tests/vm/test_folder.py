from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from skerry.clock import boot_id
from skerry.errors import AgentUnreachable, Conflict, ProviderError
from skerry.host import uids
from skerry.host.processes import Process
from skerry.vm.folder import Vm, VmFolder


@pytest.fixture
def folder(tmp_path: Path) -> VmFolder:
    folder = VmFolder(tmp_path / "vm")
    folder.make()
    return folder


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    running = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield running
    for process in running:
        process.kill()
        process.wait()


def note(folder: VmFolder, running: list[subprocess.Popen[bytes]], boot: str | None = None) -> None:
    folder.write(Vm(boot_id=boot or boot_id(), uid=None))
    warden, vmm = (Process.of(process.pid) for process in running)
    assert warden is not None
    assert vmm is not None
    folder.write_processes(warden, vmm)


def test_there_is_one_machine_in_a_folder(folder: VmFolder) -> None:
    with pytest.raises(Conflict):
        folder.make()


def test_what_was_noted_is_read_by_any_process(folder: VmFolder, processes: list[subprocess.Popen[bytes]]) -> None:
    vm = Vm(boot_id="b", uid=5, groups=["/g"], cid=7)
    folder.write(vm)
    assert VmFolder(folder.path).read() == vm
    warden, vmm = (Process.of(process.pid) for process in processes)
    assert warden is not None
    assert vmm is not None
    folder.write_processes(warden, vmm)
    assert VmFolder(folder.path).read() == msgspec.structs.replace(vm, warden=warden, vmm=vmm)


def test_an_empty_folder_tells_of_nothing(folder: VmFolder) -> None:
    assert folder.read() is None
    assert folder.read_end() is None
    assert not folder.is_running()
    assert folder.read_console() == ""


def test_half_a_note_is_none(folder: VmFolder) -> None:
    folder.file("vm.json").write_text('{"boot_id": "')
    assert folder.read() is None


def test_a_machine_runs_until_its_warden_has_told_of_its_end(
    folder: VmFolder, processes: list[subprocess.Popen[bytes]]
) -> None:
    note(folder, processes)
    assert folder.is_running()
    processes[1].kill()
    processes[1].wait()
    assert folder.is_running()
    assert folder.how_it_ended() == ""
    folder.file("ended.json").write_text('{"code": 1, "signal": null, "at": 5}')
    assert not folder.is_running()
    assert folder.how_it_ended() == "the machine ended with code 1"


def test_a_machine_without_a_warden_does_not_run(folder: VmFolder, processes: list[subprocess.Popen[bytes]]) -> None:
    note(folder, processes)
    processes[0].kill()
    processes[0].wait()
    assert not folder.is_running()
    assert folder.how_it_ended() == "the machine is not running"


def test_a_machine_of_an_earlier_boot_does_not_run(folder: VmFolder, processes: list[subprocess.Popen[bytes]]) -> None:
    note(folder, processes, boot="another")
    assert not folder.is_running()


def test_a_new_start_forgets_the_end_of_the_one_before(folder: VmFolder) -> None:
    folder.file("ended.json").write_text('{"code": 1, "signal": null, "at": 5}')
    folder.file("ended.json.new").touch()
    folder.write(Vm(boot_id=boot_id(), uid=None))
    assert folder.read_end() is None
    assert not folder.file("ended.json.new").exists()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ('{"code": 3, "signal": null, "at": 5}', "the machine ended with code 3"),
        ('{"code": null, "signal": 9, "at": 5}', "the machine was killed by signal 9"),
        ('{"code": "three"}', "the machine is not running"),
        ('{"code": 3, "more": ' + "[" * 30_000, "the machine is not running"),
    ],
)
def test_how_a_machine_ended_is_told_in_words(folder: VmFolder, end: str, said: str) -> None:
    folder.file("ended.json").write_text(end)
    assert folder.how_it_ended() == said


def test_a_full_disk_is_told_with_the_end_of_a_machine(folder: VmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = os.statvfs(folder.path)
    full = os.statvfs_result((*seen[:4], 0, *seen[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert folder.how_it_ended() == f"the machine is not running; there is no room left on the disk of {folder.path}"


def test_a_link_in_place_of_the_console_leads_nowhere(folder: VmFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder.console.symlink_to(secret)
    assert folder.read_console() == ""


def test_another_name_of_a_file_in_place_of_the_console_is_not_read(folder: VmFolder, tmp_path: Path) -> None:
    secret = folder.path.parent / "secret"
    secret.write_text("secret")
    os.link(secret, folder.console)
    assert folder.read_console() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives machines uids of their own")
def test_processes_that_a_machine_says_are_its_own_are_not_believed(folder: VmFolder) -> None:
    """Whoever ends the machine would end those."""
    vm = Vm(boot_id=boot_id(), uid=uids.take())
    folder.write(vm)
    ours = Process.of(os.getpid())
    assert ours is not None
    folder.write_processes(ours, ours)
    running = folder.read()
    assert running is not None
    assert running.warden == ours
    os.chown(folder.file("processes.json"), vm.uid or 0, vm.uid or 0)
    assert folder.read() == vm
    assert not folder.is_running()


def test_a_pipe_in_place_of_a_note_stops_nobody(folder: VmFolder) -> None:
    os.mkfifo(folder.file("ended.json"))
    assert folder.read_end() is None


def test_a_link_in_place_of_a_draft_is_not_written_through(folder: VmFolder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder.file("processes.json.new").symlink_to(victim)
    folder.write_processes(Process(1, 1), Process(2, 2))
    assert victim.read_text() == "mine"


def test_the_consoles_end_spans_both_files(folder: VmFolder) -> None:
    folder.file("console.log.1").write_text("old\r\n")
    folder.console.write_text("new\r\n")
    assert folder.read_console() == "old\nnew\n"
    assert folder.read_console(limit=7) == "\nnew\n"


def test_a_locked_machine_is_held_against_others_until_their_deadline(folder: VmFolder) -> None:
    with folder.locked(0) as exists:
        assert exists
        with pytest.raises(ProviderError, match="held by another"), VmFolder(folder.path).locked(0):
            pass
    with VmFolder(folder.path).locked(0) as exists:
        assert exists


def test_who_waited_for_a_machine_that_was_removed_learns_that_it_is_gone(folder: VmFolder) -> None:
    seen: list[bool] = []

    def wait() -> None:
        with VmFolder(folder.path).locked(30) as exists:
            seen.append(exists)

    with folder.locked(0):
        waiting = threading.Thread(target=wait)
        waiting.start()
        folder.remove()
    waiting.join()
    assert seen == [False]


def test_nobody_can_lock_what_is_not_there(tmp_path: Path) -> None:
    with VmFolder(tmp_path / "none").locked(0) as exists:
        assert not exists


def test_a_process_that_dies_lets_go_of_its_machine(folder: VmFolder) -> None:
    program = (
        "import os, sys; from pathlib import Path; from skerry.vm.folder import VmFolder\n"
        "with VmFolder(Path(sys.argv[1])).locked(0): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, folder.path])
    with folder.locked(0) as exists:
        assert exists


async def test_dialling_a_machine_that_has_ended_says_how(folder: VmFolder) -> None:
    folder.file("ended.json").write_text('{"code": 1, "signal": null, "at": 5}')
    with pytest.raises(AgentUnreachable, match="the machine ended with code 1"):
        await folder.dial(52, 5)


async def test_a_running_machine_that_answers_nothing_is_told_apart(
    folder: VmFolder, processes: list[subprocess.Popen[bytes]]
) -> None:
    note(folder, processes)
    with pytest.raises(AgentUnreachable, match="cannot reach the agent"):
        await folder.dial(52, 5)


async def test_the_end_of_a_machine_is_awaited(folder: VmFolder, processes: list[subprocess.Popen[bytes]]) -> None:
    note(folder, processes)
    assert not await folder.wait(0.01)
    waiting = asyncio.create_task(folder.wait(30))
    await asyncio.sleep(0)
    processes[0].kill()
    assert await waiting
    processes[0].wait()
    assert await folder.wait(0)


async def test_a_guest_finds_who_waits_for_it_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = VmFolder(tmp_path / ("long" * 30))
    folder.make()
    folder.ready_listener().close()
    with folder.ready_listener() as listener, folder.short() as short:
        _, writer = await asyncio.open_unix_connection(f"{short}/v.sock_1024")
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        accepted.close()
        writer.close()
        await writer.wait_closed()


def test_sockets_are_removed_and_files_are_not(folder: VmFolder) -> None:
    folder.ready_listener().close()
    folder.remove_sockets(but=folder.ready)
    assert folder.ready.exists()
    folder.remove_sockets()
    assert not folder.ready.exists()
    assert folder.file("lock").exists()


def test_removing_a_folder_twice_is_quiet(folder: VmFolder) -> None:
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


@contextlib.asynccontextmanager
async def neighbour(path: Path) -> AsyncIterator[list[bytes]]:
    """Another machine's socket, which says yes to whoever asks."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"OK 1073741824\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield asked


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has machines with users of their own")
@pytest.mark.parametrize("jailed", [False, True])
async def test_a_link_that_a_machine_put_in_place_of_its_socket_leads_nowhere(
    folder: VmFolder, tmp_path: Path, jailed: bool
) -> None:
    place = folder.file("jail") / "v.sock" if jailed else folder.channel
    if jailed:
        place.parent.mkdir()
        folder.channel.symlink_to("jail/v.sock")
    async with neighbour(tmp_path / "n") as asked:
        place.symlink_to(tmp_path / "n")
        os.lchown(place, 0x70000001, 0x70000001)
        with pytest.raises(AgentUnreachable):
            await folder.dial(52, timeout_s=2)
    assert not asked


async def test_a_link_of_ours_leads_to_the_socket_of_a_jail(folder: VmFolder) -> None:
    folder.file("jail").mkdir()
    folder.channel.symlink_to("jail/v.sock")
    async with neighbour(folder.file("jail") / "v.sock") as asked:
        (await folder.dial(52, timeout_s=2)).close()
    assert asked == [b"CONNECT 52\n"]


def test_a_folder_in_which_a_machine_made_a_very_deep_one_is_removed(folder: VmFolder) -> None:
    fd = os.open(folder.path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    folder.remove()
    assert not folder.path.exists()
