"""Starting and ending a machine's processes: the warden, and the hypervisor's own process below it.

Blocking, each call with a deadline: they are made from a thread. As root a machine runs as a uid of its own, in network
and IPC namespaces of its own; it never gains privileges, and it is in a control group where this host lets us make any.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from skerry.errors import CreateFailed, ProviderError
from skerry.host import cgroup, processes, scope, uids
from skerry.host.processes import Process
from skerry.vm import cids, network
from skerry.vm.base import CONSOLE, Limits
from skerry.vm.folder import OLDER_CONSOLE, Vm, VmFolder
from skerry.vm.spawn import Child

CHANNEL_FD = 3
"""The hypervisor's end of the channel to the guest, where it gets that by a descriptor."""
LISTEN_FD = 4
"""The first of the sockets that the hypervisor listens on."""
_FILE_FD = 10
_CONSOLE_BYTES = 512 * 1024
_START = str(Path(__file__).parent / "warden" / "start.py")


class Jail(msgspec.Struct, frozen=True, kw_only=True):
    """What is launched begins as root and makes itself into the machine's user: the warden then stays root too."""

    uid: int
    pid_file: str
    """In the folder: what is launched ends with 0 once its own child, whose pid this says, is the hypervisor."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to run in a machine's folder."""

    argv: list[str]
    files: tuple[Path, ...] = ()
    """Files that it must reach though its uid may not walk to them; `file(i)` names the i-th in `argv`."""
    channel: bool = False
    """Whether the warden serves the channel's socket, through CHANNEL_FD."""
    listen: tuple[str, ...] = ()
    """Sockets in the folder that it listens on from LISTEN_FD on, bound before it starts: who connects never waits."""
    publish: Mapping[str, int] = {}
    own: tuple[str, ...] = ()
    """Files that it may write to: names in the folder, or paths."""
    device_groups: tuple[int, ...] = ()
    """The groups that may use the devices that it needs, such as /dev/kvm."""
    network: bool = False
    """Whether its namespace has a way out; see `network.why_none`."""
    cid: int | None = None
    """Its number in the kernel's vsock, if the warden serves the channel's socket through that."""
    jail: Jail | None = None
    timeout_s: float = 10


def file(index: int) -> str:
    """The name of `Launch.files[index]` for the process that is launched."""
    return f"/proc/self/fd/{_FILE_FD + index}"


def start(folder: VmFolder, launch: Launch, limits: Limits | None) -> Vm:
    """Returns once the hypervisor's process runs. It undoes nothing: whoever calls it kills what it left."""
    with folder.locked(0) as exists:
        if not exists:
            raise CreateFailed(f"there is no folder {folder.path} to start a machine in")
        before = folder.read()
        if before is not None and _processes_of(folder, before):
            raise ProviderError(f"there are processes of a machine in {folder.path} already: kill it first")
        try:
            return _start(folder, launch, _host_limits(limits))
        except OSError as error:
            raise CreateFailed(f"the machine cannot be started: {error}") from error


def _start(folder: VmFolder, launch: Launch, limits: cgroup.Limits | None) -> Vm:
    if launch.network and (reason := network.why_none()) is not None:
        raise CreateFailed(f"the machine can have no network: {reason}")
    deadline = time.monotonic() + launch.timeout_s
    name = _group_name(folder)
    by_scope = limits is not None and bool(_scope_controllers())
    vm = Vm(
        boot_id=processes.boot_id(),
        uid=_uid(launch),
        groups=[] if limits is None or by_scope else [str(group) for group in _hierarchies().groups(name, limits)],
        cid=launch.cid,
    )
    folder.write(vm)
    folder.remove_sockets(but=folder.ready)  # somebody waits there already
    _give_to(vm.uid, folder, launch)
    command, env = _command(folder, limits if by_scope else None)
    with _opened(launch.files, vm.uid) as files, Child(command, env, files) as child:
        if limits is not None and not by_scope:
            # while the interpreter starts: a first write to cgroup.procs takes as long as that
            _hierarchies().confine(child.pid, name, limits)
        child.tell(msgspec.json.encode(_task(launch, vm)))
        answer = child.answer(deadline)
        child.join()
    warden, vmm = Process.of(answer["warden"]), Process.of(answer["vmm"])
    if warden is None or vmm is None:
        if warden is not None:
            processes.wait_until_dead(warden, max(0.0, deadline - time.monotonic()))  # it still tells how
        how = folder.how_it_ended()
        raise CreateFailed(f"the machine ended as soon as it was started: {how}", log=folder.read_console(4096))
    if by_scope and limits is not None:
        scope.check_placed(name, warden.pid, limits)
    folder.write_processes(warden, vmm)
    return msgspec.structs.replace(vm, warden=warden, vmm=vmm)


def _uid(launch: Launch) -> int | None:
    if launch.jail is not None:
        return launch.jail.uid
    return uids.take() if uids.are_available() else None


def kill(folder: VmFolder, timeout_s: float = 10) -> None:
    """End whatever there is of a machine, however far its start came, and remove its groups and sockets."""
    deadline = time.monotonic() + timeout_s
    with folder.locked(timeout_s) as exists:
        vm = folder.read() if exists else None
        if vm is None:
            return
        while found := _processes_of(folder, vm):
            if not processes.kill_and_wait(found, max(0.0, deadline - time.monotonic())):
                raise ProviderError(f"processes of the machine in {folder.path} do not die: {found}")
        cgroup.remove([Path(group) for group in vm.groups], max(0.0, deadline - time.monotonic()))
        if vm.cid is not None:
            cids.free(vm.cid, folder.path)
        folder.remove_sockets()


def _processes_of(folder: VmFolder, vm: Vm) -> set[Process]:
    if vm.boot_id != processes.boot_id():
        return set()
    found = {process for pid in cgroup.members(map(Path, vm.groups)) if (process := Process.of(pid))}
    found.update(process for process in (vm.warden, vm.vmm) if process is not None and process.is_alive())
    if vm.warden is None or not vm.groups:
        # No group tells of all that it may have started, or it died between the start and the note of it: then it is
        # found by its arguments, its folder, or its uid.
        found.update(processes.find_by_arguments((_START, str(folder.path)), 2))
        found.update(_at_work_in(folder.path))
        found.update(() if vm.uid is None else processes.find_by_uid(vm.uid))
    return found


def _at_work_in(folder: Path) -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == str(folder) and (process := Process.of(int(entry))):
                    yield process


def _group_name(folder: VmFolder) -> str:
    return f"skerry-vm-{hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]}"


@cache
def _hierarchies() -> cgroup.Hierarchies:
    return cgroup.find()


@cache
def _scope_controllers() -> set[str]:
    """Only asked for where groups cannot be made directly: systemd takes its time."""
    return scope.usable_controllers(os.geteuid()) if os.geteuid() and _hierarchies().why_not else set()


def _host_limits(limits: Limits | None) -> cgroup.Limits | None:
    if limits is None:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return cgroup.Limits(memory=limits.memory - limits.memory % page, pids=limits.pids, cpus=limits.cpus)


def _command(folder: VmFolder, scope_limits: cgroup.Limits | None) -> tuple[list[str], dict[str, str]]:
    """The warden's command, and the environment of what may come before it."""
    command = [sys.executable, "-I", "-S", _START, str(folder.path)]
    if scope_limits is None:
        return command, {}
    return [*scope.command(_group_name(folder), scope_limits), *command], scope.environment(os.geteuid())


def _task(launch: Launch, vm: Vm) -> dict[str, object]:
    return {
        "argv": launch.argv,
        "owner": vm.uid,
        "uid": vm.uid if launch.jail is None else None,
        "pid_file": None if launch.jail is None else launch.jail.pid_file,
        "groups": launch.device_groups,
        "channel": CHANNEL_FD if launch.channel else None,
        "vsock": launch.cid,
        "listen": {name: LISTEN_FD + index for index, name in enumerate(launch.listen)},
        "publish": launch.publish,
        "network": network.command() if launch.network else None,
        "files": [_FILE_FD, _FILE_FD + len(launch.files)],
        "console_bytes": _CONSOLE_BYTES,
    }


def _give_to(uid: int | None, folder: VmFolder, launch: Launch) -> None:
    if uid is None:
        return
    os.chown(folder.path, 0, uid)
    os.chmod(folder.path, 0o1770)
    for name in (*launch.own, CONSOLE, OLDER_CONSOLE):
        with contextlib.suppress(FileNotFoundError):
            _give_file(folder.path / name, uid)


def _give_file(path: Path, uid: int) -> None:
    """What another machine made before is no link to a file of ours."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ProviderError(f"{path} cannot be given to a machine: it is no file")
        os.fchown(fd, uid, uid)
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(paths: tuple[Path, ...], uid: int | None) -> Iterator[dict[int, int]]:
    with contextlib.ExitStack() as stack:
        numbers = {}
        for number, path in enumerate(paths, _FILE_FD):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            status = os.fstat(fd)
            if uid is not None and status.st_uid != uid and not status.st_mode & stat.S_IROTH:
                raise CreateFailed(f"machines may not read {path}: chmod o+r {path}")
            numbers[number] = fd
        yield numbers
