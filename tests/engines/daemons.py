"""Start and stop container engines that share nothing with those of the machine but its kernel and its docker0."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from . import leftovers
from .api import Refused, ask, ask_json

_PREFIX = "sk-eng-"
_START_S = 30.0
_STOP_S = 15.0
_RUNSC = ("--platform=systrap", "--network=none")
"""gVisor on the one platform that runs wherever Linux does. Its own network is refused by some machines."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class NotStartable(Exception):
    """This machine has not what the engine needs."""


class Daemon(ABC):
    """An engine in a folder of its own. It is started by `start`, and again by it after `kill`."""

    name: str
    programs: tuple[str, ...]

    def __init__(self) -> None:
        missing = [program for program in self.programs if find(program) is None]
        if missing:
            raise NotStartable(f"no {', '.join(missing)} here; scripts/install brings all that the tests need")
        if os.geteuid() != 0:
            raise NotStartable(f"{self.name} is started by root only")
        _sweep()
        self.folder, self._lock = _make_folder()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix://{self.folder}/{self.name}.sock"

    @property
    def pid(self) -> int:
        """The daemon's, which is another one after `kill` and `start`."""
        if self._process is None:
            raise ProcessLookupError(f"{self.name} is not running")
        return self._process.pid

    @abstractmethod
    def start(self) -> None:
        """Come back when the engine answers."""

    def kill(self) -> None:
        """SIGKILL to the daemon alone: its containers live on."""
        _end(self._process, signal.SIGKILL)
        self._process = None

    def stop(self) -> None:
        """Remove all containers and volumes, end all that was started, and leave nothing behind."""
        try:
            if self._process is not None:
                self._empty()
            self._end_daemons()
        finally:
            _remove(self.folder, self._lock)

    def _empty(self) -> None:
        with suppress(OSError, Refused):
            empty(self.address)

    def _end_daemons(self) -> None:
        _end(self._process, signal.SIGTERM)
        self._process = None

    def log(self, lines: int = 20) -> str:
        """The end of what the daemon wrote."""
        path = self.folder / f"{self.name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _run(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _PATH, "TMPDIR": "/tmp", **(env or {})},
                cwd=self.folder,  # where conmon leaves a note of each box that ran out of memory
                start_new_session=True,
            )

    def _await_answer(self, path: str = "/_ping") -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                ask(self.address, "GET", path, timeout_s=5)
            except (OSError, Refused):
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise NotStartable(f"{self.name} does not start here:\n{self.log()}") from None
                time.sleep(0.02)
            else:
                return


class Dockerd(Daemon):
    """Docker, with a containerd of its own that a killed dockerd leaves running."""

    name = "docker"
    programs = ("dockerd", "containerd", "runc", "iptables")
    settings: Mapping[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self._containerd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._containerd is None:
            self._start_containerd()
        runtimes = {"runsc": {"path": runsc, "runtimeArgs": list(_RUNSC)}} if (runsc := find("runsc")) else {}
        configuration = {
            "hosts": [self.address],
            "containerd": f"{self.folder}/c/sock",
            "data-root": f"{self.folder}/data",
            "exec-root": f"{self.folder}/x",
            "pidfile": f"{self.folder}/pid",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "live-restore": True,
            "runtimes": runtimes,
            **self.settings,
        }
        file = self.folder / "daemon.json"
        file.write_text(json.dumps(configuration))
        (self.folder / "pid").unlink(missing_ok=True)  # of one that was killed
        self._process = self._run("docker", [find("dockerd") or "", "--config-file", str(file)])
        self._await_answer()

    def _start_containerd(self) -> None:
        folder = self.folder / "c"
        folder.mkdir(exist_ok=True)
        file = folder / "config.toml"
        file.write_text(
            f'version = 2\nroot = "{folder}/root"\nstate = "{folder}/state"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
            f'[grpc]\naddress = "{folder}/sock"\n'
        )
        self._containerd = self._run("containerd", [find("containerd") or "", "--config", str(file)])

    def _end_daemons(self) -> None:
        super()._end_daemons()
        _end(self._containerd, signal.SIGTERM)
        self._containerd = None


class Podman(Daemon):
    """Podman's service, which answers as Docker does."""

    name = "podman"
    programs = ("podman", "conmon", "runc")

    def start(self) -> None:
        file = self.folder / "containers.conf"
        # Its defaults ask for more than a root without CAP_SYS_RESOURCE may have, for journald, and for locks in
        # /dev/shm that all podmans of a machine share.
        file.write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\nlog_driver = "k8s-file"\n'
            '[engine]\nevents_logger = "file"\nlock_type = "file"\ncgroup_manager = "cgroupfs"\nruntime = "runc"\n'
            f'[network]\nnetwork_config_dir = "{self.folder}/net"\n'
            f'[engine.runtimes]\nrunc = ["{find("runc")}"]\n'
        )
        folders = ["--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--tmpdir", f"{self.folder}/t"]
        argv = [find("podman") or "", *folders, "system", "service", "--time=0", self.address]
        self._process = self._run("podman", argv, {"CONTAINERS_CONF": str(file), "TMPDIR": str(self.folder)})
        self._await_answer()


_KINDS: dict[str, type[Daemon]] = {"docker": Dockerd, "podman": Podman}


@contextmanager
def running(name: str) -> Iterator[Daemon]:
    """An engine, `docker` or `podman`, for as long as this lasts."""
    daemon = _KINDS[name]()
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def find(program: str) -> str | None:
    return shutil.which(program, path=_PATH)


def empty(address: str) -> None:
    """Remove every container, every volume and every network: a bridge would outlive its daemon."""
    for container in ask_json(address, "GET", "/containers/json", {"all": "1"}):
        with suppress(Refused):
            ask(address, "DELETE", f"/containers/{container['Id']}", {"force": "1", "v": "1"})
    for volume in ask_json(address, "GET", "/volumes")["Volumes"] or []:
        with suppress(Refused):
            ask(address, "DELETE", f"/volumes/{volume['Name']}", {"force": "1"})
    for network in ask_json(address, "GET", "/networks"):
        with suppress(Refused):  # its own stay
            ask(address, "DELETE", f"/networks/{network['Id']}")


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    if process is None:
        return
    process.send_signal(how)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _make_folder() -> tuple[Path, int]:
    """A folder with a short path, as a socket's ends at 107 bytes, and the lock that says that its owner lives."""
    made = Path(tempfile.mkdtemp(prefix="sk-new-", dir="/tmp"))
    made.chmod(0o711)
    lock = _lock(made)
    folder = made.with_name(made.name.replace("sk-new-", _PREFIX))
    made.rename(folder)  # only now do others look at it
    return folder, lock


def _lock(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path, lock: int) -> None:
    try:
        leftovers.clear(folder)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _sweep() -> None:
    """Clear what runs of the tests left that were killed themselves."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove(folder, _lock(folder))
