"""Zygotes, from outside: each has an agent in its memory (`agent/guest/zygote.py`) and forks it into a new box, where
bubblewrap would start an interpreter. Programs share one where a box would inherit the same from each of them. It is
never needed: what it does not do, bubblewrap does."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.errors import ProviderError
from skerry.host import disks, folders, locks, scope
from skerry.host.processes import Process
from skerry.host.spawn import Descriptors
from skerry.model.spec import Network, Spec
from skerry.providers.local import profile
from skerry.providers.local.host import Host, unmerged_folders
from skerry.providers.local.profile import AGENT, PYTHON
from skerry.providers.shared.limits import ULIMITS

_log = logging.getLogger("skerry.providers")

_PLACE = "-" * 36
"""Where a fork writes its id; `agent/guest/zygote.py` knows it too."""
_TREE = "/box"
_IDLE_S = 60.0
_ANSWER_S = 5.0
_AGAIN_S = 5.0
"""Seconds for which none is asked that was killed, or did not come up."""
_FAILED_S = 600.0
"""Seconds for which none is used here that could not raise a wall."""
_FAILED = "failed: "
_LIMITS = sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user")
_IS_IN_GROUP = 1
_CREDENTIALS = struct.Struct("3i")


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork is to become; nothing of it is a secret, for that comes by a pipe."""

    id: str
    user: tuple[int, int]
    rules: bool
    masked: list[str]
    folders: list[tuple[str, str]]
    """Path below the root of what the box can write to, and with which options it is mounted."""


class Channels(NamedTuple):
    """Descriptors of a fork; they stay the caller's."""

    log: int
    group: int | None
    """The control group of version 2 that it begins in."""
    others: Callable[[], Sequence[int]]
    """What gets the rest ready while it is forked: the configuration, the listener, and files of groups of version 1.
    Raises ProviderError."""


class Forked:
    """A fork on its way into its box. Close it in any case."""

    def __init__(self, answers: socket.socket, process: Process) -> None:
        self._answers = answers
        self.process = process

    def why_not_whole(self) -> str | None:
        """Which wall could not be raised; None if that is not why it has ended."""
        return _failure(self._answers)

    def close(self) -> None:
        self._answers.close()


class Zygotes:
    """Zygotes of an installation, of which one suits this program."""

    def __init__(self, host: Host, folder: Path, on_child: Callable[[int], None], *, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._host = host
        self._folder = folder
        self._on_child = on_child
        self._not_before: dict[str, float] = {}

    def fork(self, uid: int | None, fork: Fork, channels: Channels) -> Forked | None:
        """Have a fork made; None if there is nobody to do it, who is then started for the next one. Raises
        ProviderError as `channels` do."""
        try:
            name = self._name()
        except OSError as error:
            _log.debug("no zygote is used: %s", error)
            return None
        if time.monotonic() < self._not_before.get(name, 0):
            return None
        answers, answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            answers.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            answers.settimeout(_ANSWER_S)
            with answer:
                fds, flags = [channels.log, answer.fileno()], 0
                if channels.group is not None:
                    fds, flags = [*fds, channels.group], _IS_IN_GROUP
                ids = (os.geteuid(), os.getegid()) if uid is None else (uid, uid)
                request = struct.pack("<3I", *ids, flags) + msgspec.json.encode(fork)
                self._send(name, request, fds)
            socket.send_fds(answers, [b"."], [*channels.others()], socket.MSG_NOSIGNAL)
            begun, said, _, _ = answers.recvmsg(1024, socket.CMSG_SPACE(_CREDENTIALS.size))
            if begun != b"begun":
                self._give_up(name, _AGAIN_S, begun.decode(errors="replace"))
                answers.close()
                return None
            process = Process.of(_pid(said))
            if process is None:  # it has ended already
                self.note_failure(_failure(answers))
                answers.close()
                return None
            return Forked(answers, process)
        except OSError as error:
            answers.close()
            if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
                self._give_up(name, _AGAIN_S, str(error))
            return None
        except BaseException:
            answers.close()
            raise

    def note_failure(self, why: str | None) -> None:
        """Use none for a while, if a fork of this program's could not raise a wall."""
        if why is not None:
            with contextlib.suppress(OSError):
                self._give_up(self._name(), _FAILED_S, why)

    def start(self) -> None:
        """Start the zygote of this program, unless there is one, somebody else does, or it was in vain lately."""
        try:
            name = self._name()
        except OSError:
            return
        if time.monotonic() < self._not_before.get(name, 0):
            return
        try:
            folders.make(self._folder)
            fd = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with contextlib.closing(os.fdopen(fd, "rb", buffering=0)):
                if locks.take(fd) and not self._is_there(name):
                    self._start(name)
        except (OSError, ProviderError) as error:
            self._give_up(name, _AGAIN_S, str(error))

    def end(self) -> None:
        """End all of them, also those of other programs; boxes that they have forked live on."""
        for path in self._folder.glob("*.sock"):
            with contextlib.suppress(OSError):
                self._send(path.stem, b"", [])

    def _give_up(self, name: str, for_s: float, why: str) -> None:
        _log.debug("no zygote is used for %d s: %s", for_s, why or "it was killed")
        self._not_before[name] = time.monotonic() + for_s

    def _send(self, name: str, request: bytes, fds: list[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, self._at(name) as path:
            sender.settimeout(_ANSWER_S)
            sender.connect(path)
            socket.send_fds(sender, [request], fds) if fds else sender.send(request)

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[str]:
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/{name}.sock"  # the address of a unix socket ends at 107 bytes
        finally:
            os.close(folder)

    def _is_there(self, name: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, self._at(name) as path:
            try:
                sender.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            return True

    def _sweep(self) -> None:
        """Remove what those have left that have ended, our own name's included."""
        for path in self._folder.glob("*.sock"):
            if not self._is_there(path.stem):
                path.unlink(missing_ok=True)
                path.with_suffix(".lock").unlink(missing_ok=True)

    def _start(self, name: str) -> None:
        self._sweep()
        with (
            contextlib.closing(Descriptors()) as inherited,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
            self._at(name) as path,
        ):
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(path)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            inherited.add(os.dup(listener.fileno()))
            program = self._host.seccomp_program.hex()
            settings = {"idle_s": self._idle_s, "program": program, "rlimits": ULIMITS}
            inherited.add_data(msgspec.json.encode(settings))
            skeleton = inherited.add(os.open(self._host.skeleton, os.O_PATH | os.O_CLOEXEC))
            options = tree_options(self._host, skeleton)
            args = inherited.add_data("\0".join(options).encode() + b"\0")
            python = self._host.own_interpreter
            command = [self._host.bwrap, "--args", str(args), "--", *python.argv, f"{AGENT}/start.py", _PLACE, "zygote"]
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._on_child(inherited.spawn(command, {}, null))
            finally:
                os.close(null)

    def _name(self) -> str:
        """A name for all that a box inherits from the program that has it made, and for what all boxes share."""
        own = [
            os.geteuid(),
            os.getresgid(),
            sorted(os.getgroups()),
            [resource.getrlimit(each) for each in _LIMITS],
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            sorted(os.sched_getaffinity(0)),
            Path("/proc/self/cgroup").read_text(),
            [os.readlink(f"/proc/self/ns/{each}") for each in _NAMESPACES],
            str(self._host.skeleton),
            self._host.own_interpreter,
            self._host.seccomp_program,
            str(self._host.bwrap),
        ]
        return hashlib.sha256(repr(own).encode()).hexdigest()[:16]


def why_not_forked(spec: Spec, holder: scope.Holder, uid: int | None) -> str | None:
    """Reason why bubblewrap makes such a box, whether or not there is a zygote; None if there is none."""
    if spec.root is not None:
        return "a root of its own"
    if spec.mounts:
        return "folders of the host in it"
    if spec.network is Network.HOST:
        return "the host's network"
    if spec.disk is not None and uid is not None and disks.why_none() is None:
        return "a disk"
    if uid is None and os.geteuid() == 0:
        return "root without uids for boxes"
    return "a scope of systemd" if holder.by_scope else None


def tree_options(host: Host, skeleton: int) -> list[str]:
    """Options of bubblewrap for a zygote: below /box the tree that boxes share, as `profile` has it; at / the means of
    an interpreter that is none of a box; and no more privileges than to become another user."""
    is_root = os.geteuid() == 0
    rights = ["CAP_SETUID", "CAP_SETGID"] if is_root else []
    usr = [word for path in ("/usr", *unmerged_folders()) for word in ("--ro-bind", path, _TREE + path)]
    portable = host.own_interpreter.portable
    python = [] if portable is None else ["--ro-bind", str(portable), _TREE + PYTHON]
    outside = [
        word
        for name in sorted(os.listdir(host.skeleton))
        if name != "proc"
        for word in ("--symlink", f"{_TREE[1:]}/{name}", f"/{name}")
    ]
    return [
        *("--unshare-ipc", "--unshare-net", "--unshare-uts", "--new-session"),
        *([] if is_root else ["--unshare-user"]),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SETPCAP"),  # which it has no more once it is ready
        *(word for right in rights for word in ("--cap-add", right)),
        *profile.bind(skeleton, _TREE),
        *usr,
        *python,
        *profile.devices(_TREE + "/dev"),
        *("--dev-bind", "/proc", "/proc"),
        *outside,
        *("--remount-ro", "/", "--chdir", "/"),
    ]


def _failure(answers: socket.socket) -> str | None:
    try:
        words = answers.recv(1024).decode(errors="replace")
    except OSError:
        return None
    return words.removeprefix(_FAILED) if words.startswith(_FAILED) else None


def _pid(said: list[tuple[int, int, bytes]]) -> int:
    """Pid of the sender, as we see it. Raises OSError if the kernel did not tell."""
    for _, kind, data in said:
        if kind == socket.SCM_CREDENTIALS:
            pid: int = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
            return pid
    raise OSError("a zygote's fork came without its credentials")
