"""Creation of a box: from the intent on disk to the start of its agent, and the check that its limits hold."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import select
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from skerry import clock
from skerry.agent.guest.users import FIRST_TO_DIE
from skerry.errors import AgentError, CallTimeout, CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable
from skerry.host import cgroup, disks, processes, scope, spawn, uids
from skerry.host.cgroup import GroupLimits
from skerry.host.processes import Process
from skerry.host.spawn import Descriptors
from skerry.model.spec import Network, SandboxId, Spec
from skerry.providers.local import boxes, host, profile
from skerry.providers.local.boxes import Box, Meta
from skerry.providers.local.host import Host
from skerry.providers.local.profile import AGENT, HOME, PYTHON
from skerry.providers.local.zygote import Channels, Fork, Forked, Zygotes, why_not_forked
from skerry.providers.shared import loopback
from skerry.providers.shared.limits import ULIMITS, BoxLimits

_log = logging.getLogger("skerry.providers")

_START = f"{AGENT}/start.py"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOG_BYTES = 64 * 1024
_LOOK_S = 0.0002
_F_ADD_SEALS = 1033
_SEAL_SHRINK_AND_GROW = 0x2 | 0x4
_NPROC_PER_NAMESPACE = (5, 14)
"""From this kernel on the count is the box's own; before, it was that of all the user's processes."""
NPROC = "RLIMIT_NPROC in the box's own user namespace"


class Defaults(BoxLimits, frozen=True, kw_only=True):
    """Limits of a box whose spec does not say, in bytes and counts."""

    start_timeout_s: float

    @property
    def written(self) -> int:
        return self.disk + self.tmp + self.shm  # scratch folders are links to /tmp

    def group_limits(self, spec: Spec) -> GroupLimits:
        asked = self.of(spec)
        return GroupLimits(memory=asked.memory - asked.memory % _PAGE, pids=asked.pids, cpus=asked.cpus)


def counts_processes() -> bool:
    """Whether RLIMIT_NPROC is of use."""
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= _NPROC_PER_NAMESPACE


def group_name(id: SandboxId) -> str:
    return f"skerry-{id}"


def processes_of(box: Box, meta: Meta | None, groups: Iterable[Path], dead: Collection[Process] = ()) -> set[Process]:
    """Find all live processes of a box, however far its creation came. Of those that are known to be dead nothing is
    asked: the kernel takes milliseconds to say that there is no such process any more."""
    if meta is not None and meta.boot_id != clock.boot_id():
        return set()
    if meta is not None and (running := box.read_processes()):
        return {process for process in running if process not in dead and process.is_alive()}
    # Died between the start and the note of it: its arguments end in the start file, the id and a number.
    found = set(processes.find_by_arguments((_START, box.id), 3))
    if meta is not None and meta.uid is not None:
        found.update(processes.find_by_uid(meta.uid))
    found.update(process for pid in cgroup.members(groups) if (process := Process.of(pid)))
    return found


class Log:
    """Output of the launcher and the agent while they start. Its size is fixed: a box cannot fill the host with it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("skerry-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.fd, _LOG_BYTES)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SHRINK_AND_GROW)

    def text(self) -> str:
        return os.pread(self.fd, _LOG_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()[-4096:]

    def close(self) -> None:
        os.close(self.fd)


class Creation:
    """One create: `start`, a greeting by the caller, `finish`, and `close` in any case. It holds the box's lock from
    start to close, and undoes nothing: whoever asked for it destroys what it left."""

    def __init__(
        self,
        host: Host,
        defaults: Defaults,
        box: Box,
        spec: Spec,
        on_child: Callable[[int], None],
        zygotes: Zygotes | None = None,
    ) -> None:
        self._host = host
        self._zygotes = zygotes
        self._box = box
        self._spec = spec
        self._on_child = on_child
        self._limits = defaults.group_limits(spec)
        self._sizes = profile.Sizes(spec.disk or defaults.disk, defaults.tmp, defaults.shm)
        self._timeout_s = defaults.start_timeout_s
        self._deadline = time.monotonic() + self._timeout_s
        self._open = contextlib.ExitStack()
        self._log: Log | None = None
        self._forked: Forked | None = None
        self._uid: int | None = None

    @property
    def left_s(self) -> float:
        """Seconds until it has to be ready."""
        return max(0.001, self._deadline - time.monotonic())

    def start(self) -> None:
        """Start the box and set its limits. Raises CreateFailed if it was destroyed meanwhile."""
        # only a destroy can have it: its end is waited for, to tell how it is
        if not self._open.enter_context(self._box.locked(self._timeout_s)):
            raise CreateFailed(f"box {self._box.id} was destroyed before it was made")
        self._log = log = self._open.enter_context(contextlib.closing(Log()))
        self._holder = scope.holder()
        self._interpreter = self._host.own_interpreter if self._spec.root is None else self._host.portable_interpreter
        self._intend()
        if self._zygotes is not None and why_not_forked(self._spec, self._holder, self._uid) is None:
            if (forked := self._fork(self._zygotes, log)) is not None:
                self._forked = forked
                self._first = forked.process
                try:
                    self._held = self._holder.check(self._first.pid, group_name(self._box.id), self._limits)
                except ProviderError as error:
                    _log.debug("box %s is not forked after all: %s", self._box.id, error)
                    self.start_anew()
                return
            self._start_plainly(log)
            self._zygotes.start()  # for the next one
        else:
            self._start_plainly(log)

    def can_start_anew(self) -> bool:
        """Whether it was forked, and so may be started in another way if it does not answer."""
        return self._forked is not None

    def start_anew(self) -> None:
        """Start what was forked in vain once more, without a zygote."""
        assert self._forked is not None
        assert self._log is not None
        assert self._zygotes is not None
        processes.wait_until_dead([self._first], self.left_s, kill=True)
        self._zygotes.note_failure(self._forked.why_not_whole())
        self._forked.close()
        self._forked = None
        self._box.forget_processes()
        self._start_plainly(self._log)

    def _start_plainly(self, log: Log) -> None:
        self._first = self._launch(log)
        name = group_name(self._box.id)
        try:
            # While the agent starts: a first write to cgroup.procs takes as long as that. No code of a user runs yet.
            with self._opening_low_ports(log):
                self._holder.confine(self._first.pid, name, self._limits)
                self._held = self._holder.check(self._first.pid, name, self._limits)
        except ProviderError:
            _identify(self._first.pid)  # if it is dead, that is what failed
            raise

    @contextlib.contextmanager
    def _opening_low_ports(self, log: Log) -> Iterator[None]:
        """Let the box's user listen on any port, where its network has rules. Raises CreateFailed."""
        if self._spec.network is not Network.RULES:
            yield
            return
        _wait_until_mapped(self._first, self._deadline)
        opener = self._host.open_low_ports(self._first.pid, self._uid, log.fd)
        try:
            yield
        finally:
            is_open = _ends_well(opener, self.left_s)
        if not is_open:
            raise CreateFailed(f"the box cannot have rules: {loopback.LOW_PORTS} cannot be set for it")

    def finish(self) -> dict[str, str]:
        """Mark the box as whole, once its agent has answered; returns how the kernel holds each limit."""
        if "pids" not in self._held and counts_processes():  # which the agent has set for itself
            limits = Path(f"/proc/{self._first.pid}/limits").read_text()
            most = re.search(r"^Max processes +(\d+) +(\d+) ", limits, re.MULTILINE)
            if most is None or int(most[2]) > self._limits.pids:
                raise ProviderError("the box has not the limit of processes that it was given")
            self._held["pids"] = NPROC
        self._box.mark_whole()
        return self._held

    def close(self) -> None:
        if self._forked is not None:
            self._forked.close()
        self._open.close()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Raise CreateFailed, with the log, for whatever fails of it."""
        try:
            yield
        except ProviderUnavailable:
            raise
        except ProviderError as error:
            raise self._failure(str(error)) from error
        except AgentError as error:
            is_late = isinstance(error.__cause__, CallTimeout | TimeoutError)
            why = "the agent did not answer in time" if is_late else f"the agent ended before it answered: {error}"
            raise self._failure(why) from error
        except BrokenPipeError as error:
            raise self._failure("the box died while it was made") from error
        except OSError as error:
            raise self._failure(f"the box cannot be made: {error}") from error

    def _failure(self, why: str) -> CreateFailed:
        _log.info("box %s is not made: %s", self._box.id, why)
        return CreateFailed(why, log="" if self._log is None else self._log.text())

    def _launch(self, log: Log) -> Process:
        """Start the box, note its processes, and only then give the agent what it waits for."""
        config_read, config_write = spawn.task_pipe()
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        with (
            contextlib.closing(Descriptors()) as inherited,
            open(config_write, "wb", 0) as config,
            open(info_read, "rb", 0) as info,
        ):
            config_number, info_number = inherited.add(config_read), inherited.add(info_write)
            listen_number = inherited.add(self._box.listen().detach())
            options = self._options(inherited, info_number)
            args_number = inherited.add_data("\0".join(options).encode() + b"\0")
            command = [self._host.bwrap, "--args", str(args_number), "--", *self._interpreter.argv, _START]
            command += [self._box.id, str(config_number)]
            command, env = self._holder.command(command, group_name(self._box.id), self._limits)
            launcher_pid = inherited.spawn([*self._host.as_uid(self._uid), *command], env, log.fd)
            self._on_child(launcher_pid)
            inherited.close()
            first = _identify(read_child_pid(info.fileno(), self._deadline))
            self._box.write_processes([first, _identify(launcher_pid)])
            _let_die_first(first)
            config.write(self._config(listen_number))
            return first

    def _fork(self, zygotes: Zygotes, log: Log) -> Forked | None:
        """Have the box forked, with its notes and limits as `_launch` has them; None where nobody does it."""
        name, hierarchies = group_name(self._box.id), self._holder.hierarchies
        config_read, config_write = spawn.task_pipe()
        with open(config_read, "rb", 0), open(config_write, "wb", 0) as config, contextlib.ExitStack() as lent:

            def others() -> list[int]:
                # nobody else keeps the listener: if the fork dies, who has dialled it hears of that
                listener = lent.enter_context(self._box.listen())
                hierarchies.make(name, self._limits, 1)
                return [config_read, listener.fileno(), *lent.enter_context(hierarchies.tasks(name, self._limits))]

            try:
                hierarchies.make(name, self._limits, 2)
                with hierarchies.folder(name, self._limits) as group:
                    forked = zygotes.fork(self._uid, self._to_fork(), Channels(log.fd, group, others))
            except ProviderError as error:  # somebody cleans up groups; the plain way tries again, and tells
                _log.debug("box %s is not forked: %s", self._box.id, error)
                return None
            finally:
                lent.close()
            if forked is None:
                return None
            self._box.write_processes([forked.process])
            _let_die_first(forked.process)
            config.write(self._config(None))
            return forked

    def _to_fork(self) -> Fork:
        return Fork(
            id=self._box.id,
            user=profile.user_of(self._spec),
            rules=self._spec.network is Network.RULES,
            masked=[path[1:] for path in profile.masked(has_own_uid=self._uid is not None)],
            folders=[(name, f"mode={mode:o},size={size}") for name, mode, size in profile.folders(self._sizes)],
        )

    def _intend(self) -> None:
        """Note what is to be made before anything of it exists, so that all that follows can be found by it."""
        self._uid = uids.take() if self._host.has_own_uids else None
        labels = {"skerry": "local", "skerry.sandbox": self._box.id, "skerry.project": self._spec.project}
        labels |= self._spec.labels
        groups = [str(group) for group in self._holder.groups(group_name(self._box.id), self._limits)]
        meta = Meta(created_at=time.time(), boot_id=clock.boot_id(), uid=self._uid, groups=groups, labels=labels)
        self._box.write_meta(meta)

    def _options(self, inherited: Descriptors, info_number: int) -> list[str]:
        return profile.options(
            user=profile.user_of(self._spec),
            has_own_uid=self._uid is not None,
            network=self._spec.network,
            root=self._root(inherited),
            home=self._home(inherited),
            sizes=self._sizes,
            mounts=[
                option
                for mount in self._spec.mounts
                for option in self._bind(mount.source, "mounts", mount.target, inherited, read_only=mount.read_only)
            ],
            info_fd=info_number,
            seccomp_fd=inherited.add_data(self._host.seccomp_program),
        )

    def _root(self, inherited: Descriptors) -> list[str]:
        portable = self._interpreter.portable
        python = [] if portable is None else self._bind(portable, "cache_dir", PYTHON, inherited)
        resolver = ["/etc/resolv.conf"] if self._spec.network is Network.HOST else []
        if self._spec.root is not None:
            entries = self._entries(self._spec.root, inherited)
            agent = self._bind(self._interpreter.agent, "cache_dir", AGENT, inherited)
            return [*entries, *agent, *python, *self._resolver_over(self._spec.root, resolver, inherited)]
        usr = profile.bind_from_host("/usr", *host.unmerged_folders(), *resolver)
        writable = (HOME + "/", "/tmp/")
        if any(not (mount.target + "/").startswith(writable) for mount in self._spec.mounts):  # they need mount points
            agent = self._bind(self._interpreter.agent, "cache_dir", AGENT, inherited)
            links = [
                word
                for name, target in self._host.links.items()
                for word in ("--symlink", target, f"{profile.LINKS}/{name}")
            ]
            return [*self._entries(self._host.skeleton, inherited), *usr, *agent, *python, *links]
        return [*self._bind(self._host.skeleton, "cache_dir", "/", inherited), *usr, *python]

    def _resolver_over(self, root: str, resolver: list[str], inherited: Descriptors) -> list[str]:
        """Options that put a resolv.conf over that of a folder; without one, programs ask the loopback."""
        own = root + loopback.RESOLV_CONF
        if self._spec.network is Network.RULES and os.path.isfile(own) and not os.path.islink(own):
            text = inherited.add_data(loopback.RESOLV_CONF_TEXT.encode())
            return ["--perms", "0444", "--ro-bind-data", str(text), loopback.RESOLV_CONF]
        return profile.bind_from_host(*resolver if os.path.isfile(own) else ())

    def _entries(self, root: str | Path, inherited: Descriptors) -> list[str]:
        with contextlib.ExitStack() as opened:
            fd = self._open_path(root, "root")
            opened.callback(os.close, fd)
            try:
                folder = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except NotADirectoryError:
                raise InvalidSpec(f"root: {str(root)!r} is not a folder", field="root") from None
            opened.callback(os.close, folder)
            return profile.root_of_folder(
                entry if entry.link is not None else entry._replace(fd=inherited.add(entry.fd))
                for entry in profile.entries_of(folder)
            )

    def _bind(
        self, path: str | Path, field: str, target: str, inherited: Descriptors, *, read_only: bool = True
    ) -> list[str]:
        return profile.bind(inherited.add(self._open_path(path, field)), target, read_only=read_only)

    def _open_path(self, path: str | Path, field: str) -> int:
        """Open a file or folder of the host, in a form that the box's uid can bind. Raises InvalidSpec."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidSpec(f"{field}: {str(path)!r} cannot be used: {error.strerror}", field=field) from None
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            os.close(fd)
            raise InvalidSpec(f"{field}: {str(path)!r} is neither a folder nor a file", field=field)
        return fd if self._uid is None else boxes.open_for_uid(self._box, fd, self._uid)

    def _home(self, inherited: Descriptors) -> list[str]:
        if self._spec.disk is None or self._uid is None or disks.why_none() is not None:
            return profile.home_in_memory(self._sizes.home)
        disk = boxes.attach_disk(self._box, self._spec.disk, self._uid)
        return profile.bind(inherited.add(disk), HOME, read_only=False)

    def _config(self, listen_number: int | None) -> bytes:
        spec, is_forked = self._spec, listen_number is None  # a fork has the zygote's limits
        config = {
            "listen": None if is_forked else {"fd": listen_number},
            "home": HOME,
            "cwd": spec.cwd or HOME,
            "env": profile.environment(spec, has_links=spec.root is None and bool(self._host.links)),
            "lifetime_s": spec.lifetime_s or None,
            "idle_s": spec.idle_s or None,
            "rules": spec.network is Network.RULES,
            "rlimits": {**({} if is_forked else ULIMITS), "nproc": self._limits.pids},
        }
        return msgspec.json.encode(config)


def read_child_pid(info_fd: int, deadline: float) -> int:
    """Read the pid of the box's first process from bubblewrap's info, which may come in pieces. Raises CreateFailed."""
    text = b""
    poll = select.poll()
    poll.register(info_fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(info_fd, 4096)
        text += piece
        try:
            return int(msgspec.json.decode(text)["child-pid"])
        except (msgspec.DecodeError, KeyError):
            if not piece:
                raise CreateFailed("bubblewrap ended before the box was made") from None
    raise CreateFailed("bubblewrap did not make the box in time")


def _ends_well(child: int, timeout_s: float) -> bool:
    """Wait for the end of a child of ours, which is killed when its time is over; whether it did what it was for."""
    process = Process.of(child)
    if process is not None and not processes.wait_until_dead([process], timeout_s):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status == 0


def _wait_until_mapped(process: Process, deadline: float) -> None:
    """Wait until bubblewrap has mapped its uid, which it does right after it told of its child. Raises CreateFailed."""
    while _identify(process.pid) == process and not Path(f"/proc/{process.pid}/uid_map").read_bytes():
        if time.monotonic() > deadline:
            raise CreateFailed("bubblewrap did not make the box in time")
        time.sleep(_LOOK_S)


def _let_die_first(process: Process) -> None:
    """Have it killed, with all that it starts, before anything else when memory runs out. The agent does that itself
    too, but only root with CAP_SYS_RESOURCE, outside the box, sets the floor that nobody in it can go below."""
    with contextlib.suppress(OSError):  # it is no plain user's to say
        Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(FIRST_TO_DIE))


def _identify(pid: int) -> Process:
    process = Process.of(pid)
    if process is None:
        raise CreateFailed("the box died while it was made")
    return process
