"""The first process of a machine, in namespaces of this host and a root of its own: all of it but the hardware."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from vm.mux_pair import Running

from skerry.agent import bundle

from .guest_process import PATIENCE_S, Wire

_SET_UP = """
set -e
mount -t tmpfs scratch "$SCRATCH"
cd "$SCRATCH"
mkdir root upper work
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
cd root
mkdir -p proc sys dev run tmp root .data .skerry .old home/user
mount --bind "$RUNTIME" .skerry
mount -t proc proc proc
mount -t sysfs sys sys
mount -t tmpfs run run
mount --rbind /dev dev
printf 'root:x:0:0::/root:/bin/sh\\nuser:x:1000:1000::/home/user:/bin/sh\\n' >etc/passwd
rm -f etc/hostname etc/machine-id
pivot_root . .old
umount -l .old
exec "$@"
"""
_CGROUP2 = next(
    (Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"),
    None,
)


def build_runtime(folder: Path) -> bundle.Portable:
    """What a machine has at /.skerry, in a folder that everybody can reach."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    portable = bundle.portable(folder)
    shutil.copytree(bundle.agent_folder(folder, portable.python), folder / "whole/agent")
    shutil.copytree(portable.folder, folder / "whole/python")
    return bundle.Portable(folder / "whole/python", portable.python)


def why_not() -> str | None:
    """None where a first process can be tried."""
    if os.geteuid() != 0:
        return "needs root"
    if _CGROUP2 is None or not os.access(_CGROUP2, os.W_OK):
        return "needs control groups of version 2"
    with tempfile.TemporaryDirectory() as scratch:
        argv = ["unshare", "-mCuinpf", "--mount-proc", "sh", "-c", _SET_UP, "sh", "true"]
        probe = subprocess.run(argv, env={**os.environ, "SCRATCH": scratch, "RUNTIME": "/usr"}, capture_output=True)
    return f"needs namespaces and overlays: {probe.stderr.decode()}" if probe.returncode else None


class FirstProcess:
    def __init__(self, portable: bundle.Portable, *words: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="skerry-first-"))
        self.path = self.folder / "v.sock"
        self._portable = portable
        self._words = words
        self._runner = Running()

    def __enter__(self) -> Self:
        from skerry.vm.warden.mux import HostMux

        assert _CGROUP2 is not None
        self._group = _CGROUP2 / f"skerry-test-{secrets.token_hex(4)}"
        self._group.mkdir()
        (self.folder / "scratch").mkdir()
        ours, theirs = socket.socketpair()
        argv = ["sh", "-c", 'echo $$ >"$GROUP/cgroup.procs"; exec "$@"', "sh"]
        argv += ["unshare", "-mCuinpf", "--mount-proc", "--kill-child", "sh", "-c", _SET_UP, "sh"]
        argv += self._portable.argv("/.skerry/python")
        argv += [
            "/.skerry/agent/machine.py",
            f"skerry.channel=fd:{theirs.fileno()}",
            "skerry.drives=none",
            *self._words,
        ]
        env = {"PATH": os.environ["PATH"], "SCRATCH": f"{self.folder}/scratch", "GROUP": str(self._group)}
        env["RUNTIME"] = str(self._portable.folder.parent)
        self.log = (self.folder / "log").open("w+b")
        self.process = subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()], stdout=self.log, stderr=self.log)
        theirs.close()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()

        def serve() -> None:
            self.mux = HostMux(self._runner.loop, ours.detach(), listener, f"{self.path}_1024")

        self._runner.do(serve)
        return self

    def connect(self, port: int) -> socket.socket:
        """A stream to a port; its end at once if it is refused."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(self.path))
        connection.sendall(b"CONNECT %d\n" % port)
        answer = b""
        while not answer.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                connection.close()
                raise ConnectionRefusedError(port)
            answer += byte
        assert answer.startswith(b"OK ")
        return connection

    def wire(self, port: int) -> Wire:
        return Wire(self.connect(port))

    def words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._runner.do(self.mux.close)
        self._runner.stop()
        words = self.words()
        self.log.close()
        for group in (*self._group.iterdir(), self._group):
            if group.is_dir():
                _remove(group)
        shutil.rmtree(self.folder)
        assert "Traceback" not in words, words[-1500:]


def _remove(group: Path) -> None:
    """Once its last process is gone, which takes a moment after its end was told."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            try:
                return group.rmdir()
            except OSError as error:
                if error.errno != 16:
                    raise


def preparation(**changes: Any) -> dict[str, Any]:
    env = {"PATH": "/usr/bin:/bin", "HOME": "/home/user"}
    return {"user": "user", "home": "/home/user", "cwd": "/home/user", "env": env, **changes}
