"""Starting and ending a machine's processes: the warden, and the hypervisor's own process below it.

Blocking, each call with a deadline: they are made from a thread. As root a machine runs as a uid of its own, in network
and IPC namespaces of its own; it never gains privileges, and it is in a control group where this host lets us make any.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from skerry import clock
from skerry.errors import CreateFailed, LimitReached, ProviderError
from skerry.host import cgroup, processes, scope, uids
from skerry.host.processes import Process
from skerry.host.spawn import Child
from skerry.vm.base import CONSOLE, FIRST_CID, MachineLimits
from skerry.vm.folder import OLDER_CONSOLE, Vm, VmFolder, is_its_own, locked_file

_log = logging.getLogger("skerry.vm")

CHANNEL_FD = 3
"""Hypervisor's end of the channel to the guest, where it gets that by a descriptor."""
LISTEN_FD = 4
"""First of the sockets that the hypervisor listens on."""
_FILE_FD = 10
_CONSOLE_BYTES = 512 * 1024
_START = str(Path(__file__).parent / "warden" / "start.py")
_CIDS = Path("/run/skerry/cids")
"""CIDs in use, for the whole host, not for an installation: the kernel knows a number once."""
_CID_COUNT = 65536
_PATH = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin"
_CIDR = "10.0.3.0/24"
"""Network between the machine's namespace and the host; the guest's own, which its hypervisor makes, is another."""
NAMESERVER = "10.0.3.3"
"""Nameserver of guests: it asks the host's own resolver."""


class JailedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that begins as root and drops to the machine's user itself: the warden then stays root too."""

    uid: int
    pid_file: str
    """In the folder: what is launched ends with 0 once its own child, whose pid this says, is the hypervisor."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Process to run in a machine's folder."""

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
    """Groups that may use the devices that it needs, such as /dev/kvm."""
    network: bool = False
    """Whether its namespace has a way out; see `why_no_network`."""
    cid: int | None = None
    """Its number in the kernel's vsock, if the warden serves the channel's socket through that."""
    jail: JailedProcess | None = None
    small_pages: bool = False
    """Whether its memory comes in pages of the smallest size alone, so that it takes no more than it uses."""
    timeout_s: float = 10


def file(index: int) -> str:
    """Name of `Launch.files[index]` for the process that is launched."""
    return f"/proc/self/fd/{_FILE_FD + index}"


def start(folder: VmFolder, launch: Launch, limits: MachineLimits | None) -> Vm:
    """Start the hypervisor's process below a warden. Raises CreateFailed or ProviderError; the caller kills it then."""
    with folder.locked(0) as exists:
        if not exists:
            raise CreateFailed(f"there is no folder {folder.path} to start a machine in")
        before = folder.read()
        if before is not None and _processes_of(folder, before):
            raise ProviderError(f"there are processes of a machine in {folder.path} already: kill it first")
        try:
            return _start(folder, launch, _host_limits(limits), is_first=before is None)
        except OSError as error:
            raise CreateFailed(f"the machine cannot be started: {error}") from error


def _start(folder: VmFolder, launch: Launch, limits: cgroup.GroupLimits | None, *, is_first: bool) -> Vm:
    if launch.network and (reason := why_no_network()) is not None:
        raise CreateFailed(f"the machine can have no network: {reason}")
    deadline = time.monotonic() + launch.timeout_s
    name = _group_name(folder)
    uid = launch.jail.uid if launch.jail is not None else uids.take() if uids.are_available() else None
    holder = None if limits is None else scope.holder()
    vm = Vm(
        boot_id=clock.boot_id(),
        uid=uid,
        groups=[str(group) for group in holder.groups(name, limits)] if holder and limits else [],
        cid=launch.cid,
    )
    folder.write(vm)
    folder.remove_sockets(but=folder.ready)  # somebody waits there already
    _give_to(vm.uid, folder, launch, is_first=is_first)
    command, env = [sys.executable, "-I", "-S", _START, str(folder.path)], dict[str, str]()
    if holder and limits:
        command, env = holder.command(command, name, limits)
    with _opened(launch.files, vm.uid) as files, Child(command, env, files) as child:
        if holder and limits:
            # while the interpreter starts: a first write to cgroup.procs takes as long as that
            holder.confine(child.pid, name, limits)
        child.tell(msgspec.json.encode(_task(launch, vm)))
        answer = child.answer(deadline)
        child.join()
    warden, vmm = Process.of(answer["warden"]), Process.of(answer["vmm"])
    if warden is None or vmm is None:
        if warden is not None:
            processes.wait_until_dead([warden], max(0.0, deadline - time.monotonic()))  # it still tells how
        how = folder.how_it_ended()
        raise CreateFailed(f"the machine ended as soon as it was started: {how}", log=folder.read_console(4096))
    folder.write_processes(warden, vmm)
    if holder and limits:
        for process in (warden, vmm):
            _check_held(process, holder, name, limits)
    return msgspec.structs.replace(vm, warden=warden, vmm=vmm)


def _check_held(process: Process, holder: scope.Holder, name: str, limits: cgroup.GroupLimits) -> None:
    try:
        holder.check(process.pid, name, limits)
    except ProviderError as error:
        if process.is_alive():  # how one ended is told by whoever waits for its guest
            raise
        _log.debug("process %d of group %s ended before its limits were checked: %s", process.pid, name, error)


def kill(folder: VmFolder, timeout_s: float = 10) -> None:
    """End whatever there is of a machine, however far its start came, and remove its groups and sockets."""
    deadline = time.monotonic() + timeout_s
    with folder.locked(timeout_s) as exists:
        vm = folder.read() if exists else None
        if vm is None:
            return
        _kill_processes(folder, vm, deadline)
        cgroup.remove([Path(group) for group in vm.groups], max(0.0, deadline - time.monotonic()))
        if vm.cid is not None:
            free_cid(vm.cid, folder.path)
        folder.remove_sockets()
        if vm.warden is None:
            with contextlib.suppress(OSError):  # what is killed is killed, also where no file can be made
                folder.write_killed(vm)


def kill_if_left_alone(folder: VmFolder, timeout_s: float = 10) -> None:
    """Kill a hypervisor that has outlived its warden, as a jailer's does, before anybody takes it for ended: nobody
    keeps its console or would tell of its end. Raises ProviderError if it does not die."""
    if not folder.is_left_alone():
        return
    with folder.locked(timeout_s) as exists:
        vm = folder.read() if exists else None
        if vm is not None and folder.is_left_alone():  # it may be another one by now
            _log.warning("killing the machine in %s, which has lost its warden", folder.path)
            _kill_processes(folder, vm, time.monotonic() + timeout_s)


def _kill_processes(folder: VmFolder, vm: Vm, deadline: float) -> None:
    while found := _processes_of(folder, vm):
        _log.debug("killing %d processes of the machine in %s", len(found), folder.path)
        if not processes.wait_until_dead(found, max(0.0, deadline - time.monotonic()), kill=True):
            raise ProviderError(f"processes of the machine in {folder.path} do not die: {found}")


def _processes_of(folder: VmFolder, vm: Vm) -> set[Process]:
    if vm.boot_id != clock.boot_id():
        return set()
    found = {process for pid in cgroup.members(map(Path, vm.groups)) if (process := Process.of(pid))}
    found.update(process for process in (vm.warden, vm.vmm) if process is not None and process.is_alive())
    if vm.warden is None or not vm.groups:
        # no group tells of all, or it died before it was noted: it is found by its arguments, its folder, or its uid
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


def _host_limits(limits: MachineLimits | None) -> cgroup.GroupLimits | None:
    if limits is None:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return cgroup.GroupLimits(memory=limits.memory - limits.memory % page, pids=limits.pids, cpus=limits.cpus)


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
        "network": _network_command() if launch.network else None,
        "small_pages": launch.small_pages,
        "files": [_FILE_FD, _FILE_FD + len(launch.files)],
        "console_bytes": _CONSOLE_BYTES,
    }


def _give_to(uid: int | None, folder: VmFolder, launch: Launch, *, is_first: bool) -> None:
    if uid is None:
        return
    os.chown(folder.path, 0, uid)
    os.chmod(folder.path, 0o1770)
    # a warden that stays root may open nobody else's file in a sticky folder, where fs.protected_regular is set
    keeper = uid if launch.jail is None else 0
    for name, owner in (*((name, uid) for name in launch.own), (CONSOLE, keeper), (OLDER_CONSOLE, keeper)):
        with contextlib.suppress(FileNotFoundError):
            _give_file(folder.path / name, owner, is_first=is_first)


def _give_file(path: Path, uid: int, *, is_first: bool) -> None:
    """Give a file to a uid, but no link, nor what an earlier run of it may have put in its place: before
    the first, all is ours, and a volume has two names. Raises ProviderError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not (stat.S_ISREG(found.st_mode) if is_first else is_its_own(found)):
            raise ProviderError(f"{path} cannot be given to a machine: it is no file of its own")
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


def take_cid(owner: Path, wanted: int | None = None, folder: Path = _CIDS) -> int:
    """Take the number of the kernel's vsock that is wanted, or any that no machine has: its owner's folder is gone.
    Raises LimitReached, or CreateFailed if another has the one that is wanted."""
    with _locked_cids(folder):
        for cid in range(FIRST_CID, FIRST_CID + _CID_COUNT) if wanted is None else (wanted,):
            entry = folder / str(cid)
            holder = _holder(entry)
            if holder is None or (wanted is not None and holder == str(owner)):
                entry.unlink(missing_ok=True)
                entry.symlink_to(owner)
                return cid
    if wanted is not None:
        raise CreateFailed(f"the machine in {holder} has the CID {wanted} already, that of another registry: try again")
    raise LimitReached("all guest numbers for vsock are taken: end machines that are not used")


def free_cid(cid: int, owner: Path, folder: Path = _CIDS) -> None:
    """Give a number back; quiet if it is another's by now."""
    with _locked_cids(folder), contextlib.suppress(FileNotFoundError):
        if os.readlink(folder / str(cid)) == str(owner):
            os.unlink(folder / str(cid))


def _holder(entry: Path) -> str | None:
    """Folder of the machine that has a number; None if it is gone."""
    try:
        holder = os.readlink(entry)
    except FileNotFoundError:
        return None
    return holder if os.path.isdir(holder) else None


def _locked_cids(folder: Path) -> contextlib.AbstractContextManager[None]:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return locked_file(folder / ".lock")  # not the folder itself: anybody may open that, and could lock us out


def why_no_network() -> str | None:
    """Reason why machines can have no network that leads out and not to the host; None where they can."""
    if os.geteuid() != 0:
        return "only root can give a machine a network that does not lead to the host's own services"
    if shutil.which("slirp4netns", path=_PATH) is None:
        return "slirp4netns is not installed: apt-get install slirp4netns"
    return None


def _network_command() -> list[str]:
    """Command that joins a namespace to the outside, without the namespace. Its sandbox gives up all mounts that it
    sees: it sees copies, as the host would lose those that are shared, such as the namespaces of `ip netns`."""
    program = shutil.which("slirp4netns", path=_PATH) or "slirp4netns"
    apart = [shutil.which("unshare", path=_PATH) or "unshare", "--mount", "--propagation=private", "--"]
    safe = ["--disable-host-loopback", "--enable-sandbox", "--enable-seccomp"]
    return [*apart, program, "--configure", "--mtu=65520", f"--cidr={_CIDR}", *safe]
