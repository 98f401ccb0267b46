"""Making one box, from the intent on disk to the first answer of its agent."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from skerry.errors import CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable
from skerry.host import cgroup, processes, scope, uids
from skerry.host.cgroup import Limits
from skerry.host.processes import Process
from skerry.providers import disks
from skerry.providers.local import launch, mounts, profile, skeleton
from skerry.providers.local.boxes import Box, Meta
from skerry.providers.local.host import Host, Interpreter
from skerry.spec import Mount, Network, SandboxId, Spec

_START = f"{skeleton.AGENT}/start.py"
_HELLO = b'{"jsonrpc":"2.0","id":1,"method":"hello","params":{"protocol":1}}\n'
_MAX_HELLO = 64 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
_RLIMITS = {"core": 0, "nofile": 1024, "memlock": 64 * 1024, "msgqueue": 0, "rtprio": 0, "nice": 0}


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a box gets where its spec does not say, in bytes and counts."""

    memory: int
    pids: int
    cpus: float | None
    disk: int
    tmp: int
    shm: int
    start_timeout_s: float

    def limits(self, spec: Spec) -> Limits:
        memory = self.memory if spec.memory is None else spec.memory
        return Limits(
            memory=memory - memory % _PAGE,
            pids=self.pids if spec.pids is None else spec.pids,
            cpus=self.cpus if spec.cpus is None else spec.cpus,
        )


def group_name(id: SandboxId) -> str:
    return f"skerry-{id}"


def processes_of(box: Box, meta: Meta | None, groups: Iterable[Path]) -> set[Process]:
    """Everything that lives of a box, however far its creation came."""
    if meta is not None and meta.boot_id != processes.boot_id():
        return set()
    if meta is not None and (running := box.read_processes()):
        return {process for process in running if process.is_alive()}
    # Died between the start and the note of it: its arguments end in the start file, the id and a number.
    found = set(processes.find_by_arguments((_START, box.id), 3))
    if meta is not None and meta.uid is not None:
        found.update(processes.find_by_uid(meta.uid))
    found.update(process for pid in cgroup.members(groups) if (process := Process.of(pid)))
    return found


class Creation:
    """One create. It undoes nothing: whoever asked for it destroys what it left."""

    def __init__(self, host: Host, defaults: Defaults, box: Box, spec: Spec, on_child: Callable[[int], None]) -> None:
        self._host = host
        self._box = box
        self._spec = spec
        self._on_child = on_child
        self._limits = defaults.limits(spec)
        self._sizes = profile.Sizes(spec.disk or defaults.disk, defaults.tmp, defaults.shm)
        self._timeout_s = defaults.start_timeout_s
        self._deadline = time.monotonic() + self._timeout_s
        self._by_scope = bool(host.scope_controllers)
        self._interpreter: Interpreter = host.own_interpreter if spec.root is None else host.portable_interpreter

    def run(self) -> None:
        # only a destroy can have it: its end is waited for, to tell how it is
        with self._box.locked(self._timeout_s) as exists, contextlib.closing(launch.Log()) as log:
            if not exists:
                raise CreateFailed(f"box {self._box.id} was destroyed before it was made")
            try:
                self._run(log)
            except ProviderUnavailable:
                raise
            except ProviderError as error:
                raise CreateFailed(str(error), log=log.text()) from error
            except BrokenPipeError as error:
                raise CreateFailed("the box died while it was made", log=log.text()) from error
            except OSError as error:
                raise CreateFailed(f"the box cannot be made: {error}", log=log.text()) from error

    def _run(self, log: launch.Log) -> None:
        meta = self._intend()
        first = self._start(meta, log)
        try:
            self._limit(first.pid)
        except ProviderError:
            _identify(first.pid)  # if it is dead, that is what failed
            raise
        self._await_hello()
        self._box.mark_whole()

    def _start(self, meta: Meta, log: launch.Log) -> Process:
        """Start the box, note its processes, and only then give the agent what it waits for."""
        config_read, config_write = launch.pipe_for_config()
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        with (
            contextlib.closing(launch.Descriptors()) as inherited,
            open(config_write, "wb", 0) as config,
            open(info_read, "rb", 0) as info,
        ):
            config_number, info_number = inherited.add(config_read), inherited.add(info_write)
            listen_number = inherited.add(self._box.listen().detach())
            options = self._options(inherited, info_number, meta)
            args_number = inherited.add_data("\0".join(options).encode() + b"\0")
            launcher_pid = self._spawn(inherited, log, args_number, config_number, meta)
            inherited.close()
            first = _identify(launch.read_child_pid(info.fileno(), self._deadline))
            self._box.write_processes([first, _identify(launcher_pid)])
            config.write(self._config(listen_number))
            return first

    def _intend(self) -> Meta:
        """Written before anything else exists, so that all that follows can be found by it."""
        spec = self._spec
        meta = Meta(
            created_at=time.time(),
            boot_id=processes.boot_id(),
            uid=uids.take() if self._host.has_own_uids else None,
            groups=[str(group) for group in self._groups()],
            labels={"skerry": "local", "skerry.sandbox": self._box.id, "skerry.project": spec.project, **spec.labels},
        )
        self._box.write_meta(meta)
        return meta

    def _groups(self) -> list[Path]:
        if self._by_scope:
            return []
        return self._host.hierarchies.groups(group_name(self._box.id), self._limits)

    def _options(self, inherited: launch.Descriptors, info_number: int, meta: Meta) -> list[str]:
        return profile.options(
            user=profile.user_of(self._spec),
            network=self._spec.network,
            root=self._root(inherited),
            home=self._home(inherited, meta),
            sizes=self._sizes,
            mounts=[option for mount in self._spec.mounts for option in self._bind(mount, inherited)],
            info_fd=info_number,
            seccomp_fd=inherited.add_data(self._host.seccomp_program),
        )

    def _root(self, inherited: launch.Descriptors) -> list[str]:
        portable = self._interpreter.portable
        python = [] if portable is None else self._shared(portable, skeleton.PYTHON, inherited)
        resolver = ["/etc/resolv.conf"] if self._spec.network is Network.HOST else []
        if self._spec.root is not None:
            has_resolver = os.path.isfile(f"{self._spec.root}/etc/resolv.conf")
            return [
                *self._entries(self._spec.root, inherited),
                *self._shared(self._interpreter.agent, skeleton.AGENT, inherited),
                *python,
                *profile.bind_from_host(*resolver if has_resolver else ()),
            ]
        usr = profile.bind_from_host("/usr", *skeleton.unmerged_folders(), *resolver)
        if self._needs_mount_points():
            agent = self._shared(self._interpreter.agent, skeleton.AGENT, inherited)
            return [*self._entries(self._host.skeleton, inherited), *usr, *agent, *python]
        return [*self._shared(self._host.skeleton, "/", inherited), *usr, *python]

    def _shared(self, folder: Path, target: str, inherited: launch.Descriptors) -> list[str]:
        return profile.bind(inherited.add(self._open(folder, "cache_dir")), target)

    def _entries(self, root: str | Path, inherited: launch.Descriptors) -> list[str]:
        fd = self._open(root, "root")
        try:
            folder = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise InvalidSpec(f"root: {str(root)!r} is not a folder", field="root") from None
        finally:
            os.close(fd)
        try:
            return profile.root_of_folder(_inherit(profile.entries_of(folder), inherited))
        finally:
            os.close(folder)

    def _bind(self, mount: Mount, inherited: launch.Descriptors) -> list[str]:
        fd = self._open(mount.source, "mounts")
        return profile.bind(inherited.add(fd), mount.target, read_only=mount.read_only)

    def _open(self, path: str | Path, field: str) -> int:
        """A descriptor of a file or folder of the host, in a form that the box's uid can bind."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidSpec(f"{field}: {str(path)!r} cannot be used: {error.strerror}", field=field) from None
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            os.close(fd)
            raise InvalidSpec(f"{field}: {str(path)!r} is neither a folder nor a file", field=field)
        return mounts.open_way(self._box, fd) if self._host.has_own_uids else fd

    def _needs_mount_points(self) -> bool:
        writable = (skeleton.HOME + "/", "/tmp/")
        return any(not (mount.target + "/").startswith(writable) for mount in self._spec.mounts)

    def _home(self, inherited: launch.Descriptors, meta: Meta) -> list[str]:
        if self._spec.disk is None or meta.uid is None or disks.why_none() is not None:
            return profile.home_in_memory(self._sizes.home)
        disk = mounts.attach_disk(self._box, self._spec.disk, meta.uid)
        return profile.bind(inherited.add(disk), skeleton.HOME, read_only=False)

    def _spawn(self, inherited: launch.Descriptors, log: launch.Log, args: int, config: int, meta: Meta) -> int:
        command = [self._host.bwrap, "--args", str(args), "--", *self._interpreter.argv, _START]
        command += [self._box.id, str(config)]
        env: dict[str, str] = {}
        if self._by_scope:
            command = [*scope.command(group_name(self._box.id), self._limits), *command]
            env = scope.environment(os.geteuid())
        pid = inherited.spawn([*self._host.as_uid(meta.uid), *command], env, log.fd)
        self._on_child(pid)
        return pid

    def _config(self, listen_number: int) -> bytes:
        spec = self._spec
        return msgspec.json.encode(
            {
                "listen": {"fd": listen_number},
                "home": skeleton.HOME,
                "cwd": spec.cwd or skeleton.HOME,
                "env": profile.environment(spec),
                "lifetime_s": spec.lifetime_s or None,
                "idle_s": spec.idle_s or None,
                "rlimits": _RLIMITS | {"nproc": self._limits.pids},
            }
        )

    def _limit(self, pid: int) -> None:
        """While the agent starts: a first write to cgroup.procs takes as long as that. No code of a user runs yet."""
        name = group_name(self._box.id)
        if self._by_scope:
            scope.check_placed(name, pid, self._limits)
        else:
            self._host.hierarchies.confine(pid, name, self._limits)

    def _await_hello(self) -> None:
        try:
            with self._box.connect() as connection:
                connection.settimeout(max(0.001, self._deadline - time.monotonic()))
                connection.sendall(_HELLO)
                answer = _read_line(connection, self._deadline)
        except TimeoutError as error:
            raise CreateFailed("the agent did not answer in time") from error
        except OSError as error:
            raise CreateFailed(f"the agent ended before it answered: {error.strerror}") from error
        _check_hello(answer)


def _identify(pid: int) -> Process:
    process = Process.of(pid)
    if process is None:
        raise CreateFailed("the box died while it was made")
    return process


def _inherit(entries: Iterable[profile.Entry], inherited: launch.Descriptors) -> Iterator[profile.Entry]:
    for entry in entries:
        yield entry if entry.link is not None else entry._replace(fd=inherited.add(entry.fd))


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > _MAX_HELLO:
            raise CreateFailed("the agent's first answer is too long")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(4096)
        if not piece:
            raise CreateFailed("the agent ended before it answered")
        line += piece
    return line


def _check_hello(line: bytes) -> None:
    try:
        answer = msgspec.json.decode(line)
        accepted = isinstance(answer, dict) and isinstance(answer.get("result"), dict)
    except msgspec.DecodeError:
        accepted = False
    if not accepted:
        raise ProviderError(f"the agent's first answer is not one: {line[:200]!r}")
