"""What is behind the vsock of the stand-in for Firecracker: real agents, and the calls that PID 1 of a guest answers.

Without a machine there is no disk to mount: a disk's content is a tar of the home folder, written where a guest would
write back what it holds (freeze, shutdown, snapshot), so that it goes where the disk's file goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

CONTROL_PORT, AGENT_PORT, READY_PORT = 51, 52, 1024
_FIRST_HOST_PORT = 1 << 30
_CONNECT = re.compile(rb"connect (\d+)\r?\n", re.IGNORECASE)
_PR_SET_PDEATHSIG = 1
_NEW_MOUNTS, _NEW_USERS, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x10000000, 0x20000000, 0x40000000
_BIND = 4096
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_DROPPED_AFTER_S = 2.0
_TAR_AT = 4096


class Guest:
    """One guest, from its boot or its restore to its end. `end` is called when it powers off."""

    def __init__(self, agent: str, guests: str, end: Callable[[int], None], shuts_down_s: float = 0.0) -> None:
        """In `guests` it has a folder that is its disk while it runs."""
        self._agent = agent
        self._mounted = tempfile.mkdtemp(dir=guests)
        self._end = end
        self._shuts_down_s = shuts_down_s
        self._server: asyncio.AbstractServer | None = None
        self._path = ""
        self._streams: set[asyncio.StreamWriter] = set()
        self._ports: dict[int, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._disks: list[str] = []
        self._prepared: dict[str, Any] | None = None
        self._is_up = False
        self._is_seeded = False
        self._is_lost = False
        self._count = 0
        self._runs = asyncio.Event()
        self._runs.set()

    # what the VMM does

    async def bind(self, path: str) -> None:
        """Asyncio would remove what is there; Firecracker does not, and says so."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        self._path = path
        self._server = await asyncio.start_unix_server(self._accepted, sock=listener)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            os.unlink(self._path)

    def boot(self, boot_args: str, disks: list[str]) -> None:
        if "skerry.probe" in boot_args.split():
            print("skerry: this kernel runs", flush=True)
            asyncio.get_running_loop().call_soon(self._end, 0)
            return
        print("skerry: the stand-in for a guest is up", flush=True)
        self._disks = disks
        self._is_up = True
        self._spawn(self._push_ready())

    def freeze(self, frozen: bool) -> None:
        if frozen:
            self._runs.clear()
        else:
            self._runs.set()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def lose_vsock(self) -> None:
        """Answer nobody who connects from now on."""
        self._is_lost = True

    def save(self) -> dict[str, Any]:
        """Streams are closed by it, as in Firecracker."""
        for stream in list(self._streams):
            stream.close()
        self._write_back()
        return {"prepared": self._prepared, "count": self._count}

    def restore(self, saved: dict[str, Any], disks: list[str], *, frozen: bool) -> None:
        self._disks, self._count, self._is_up = disks, saved["count"], True
        if saved["prepared"] is not None:
            self._prepare(saved["prepared"])
        self.freeze(frozen)

    # the vsock

    async def _push_ready(self) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(f"{self._path}_{READY_PORT}")
            writer.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        try:
            await self._serve(reader, writer)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._streams.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await asyncio.wait_for(reader.read(1024), _DROPPED_AFTER_S)
        wanted = _CONNECT.match(first)
        if wanted is None or not self._is_up:
            return
        await asyncio.wait_for(self._runs.wait(), _DROPPED_AFTER_S)
        if self._is_lost:
            await reader.read()  # until who waits for an answer gives up
            return
        port, rest = int(wanted[1]), first[wanted.end() :]
        if port == CONTROL_PORT:
            self._answer_connect(writer)
            await self._control(reader, writer, rest)
        elif port in self._ports:
            inner_reader, inner = await asyncio.open_unix_connection(self._ports[port])
            self._answer_connect(writer)
            inner.write(rest)
            try:
                await asyncio.gather(_pump(reader, inner), _pump(inner_reader, writer))
            finally:
                inner.close()

    def _answer_connect(self, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        writer.write(b"OK %d\n" % (_FIRST_HOST_PORT + self._count))

    # PID 1

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytes) -> None:
        while True:
            while b"\n" not in kept:
                piece = await reader.read(65536)
                if not piece:
                    return
                kept += piece
            line, _, kept = kept.partition(b"\n")
            await self._runs.wait()
            request = json.loads(line)
            if "id" not in request:
                continue
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            try:
                answer["result"] = self._call(request["method"], request.get("params") or {})
            except ValueError as error:
                answer["error"] = {"code": -32000, "message": str(error), "data": {"kind": "invalid"}}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

    def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "hello":
            return {"protocol": 1, "agent": "stand-in", "pid": 1, "started": 0.0}
        if method == "reseed":
            if len(bytes.fromhex(params["entropy"])) != 64 or params["time"] <= 0:
                raise ValueError("reseed needs 64 bytes of entropy and the time")
            self._is_seeded = True
            return {}
        if not self._is_seeded:
            raise ValueError(f"{method} before reseed: it must be the first call after every boot or restore")
        if method == "exec":
            subprocess.run(params["argv"], check=True)
            return {"exit_code": 0}
        if method == "prepare":
            return self._prepare(params)
        if method == "agent_as":
            return {"port": self._start_agent(AGENT_PORT + 1 + len(self._ports), self._prepared or {})}
        if method in ("freeze", "hold"):
            self._write_back()
        elif method == "shutdown":
            self._spawn(self._shut_down())
        elif method not in ("ping", "thaw", "sync_clock", "set_lifetime"):
            raise ValueError(f"there is no {method}")
        return {}

    def _prepare(self, params: dict[str, Any]) -> dict[str, Any]:
        self._prepared = params
        self._read_disk()
        self._start_agent(AGENT_PORT, params)
        return {}

    def _start_agent(self, port: int, params: dict[str, Any]) -> int:
        self._ports[port] = f"\0skerry-fake-{self._mounted}-{port}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._ports[port])
            listener.listen(100)
            config = {"home": self._mounted, "env": {"PATH": "/usr/bin:/bin", **(params.get("env") or {})}}
            config.update(listen={"fd": listener.fileno()}, lifetime_s=params.get("lifetime_s"))
            argv = [sys.executable, "-I", "-S", "-B", self._agent, "fake", json.dumps(config)]
            process = subprocess.Popen(
                argv,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(_begin, bool(params.get("network")), self._mounted),
            )
        self._processes.append(process)
        if port == AGENT_PORT:
            self._spawn(self._end_with(process))
        return port

    async def _end_with(self, process: subprocess.Popen[bytes]) -> None:
        """The machine powers off when the user's agent ends."""
        ended = asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._write_back()
        self._end(0)

    async def _shut_down(self) -> None:
        await asyncio.sleep(self._shuts_down_s)
        self._write_back()
        for process in self._processes:
            process.kill()
            process.wait()
        self._end(0)

    def _write_back(self) -> None:
        if self._prepared is None or not self._prepared.get("mount_disk", True) or not self._disks:
            return
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(self._mounted, arcname=".", filter=lambda each: each if each.isfile() or each.isdir() else None)
        with open(self._disks[0], "r+b") as disk:
            disk.seek(_TAR_AT)
            disk.write(packed.getvalue())

    def _read_disk(self) -> None:
        if self._prepared is None or not self._prepared.get("mount_disk", True) or not self._disks:
            return
        with open(self._disks[0], "rb") as disk:
            disk.seek(_TAR_AT)
            with contextlib.suppress(tarfile.ReadError), tarfile.open(fileobj=disk, mode="r:") as tar:
                tar.extractall(self._mounted)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            piece = await reader.read(65536)
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _begin(has_rules: bool, mounted: str) -> None:
    """Die with the guest; with rules, be the first process of namespaces that are prepared as a machine is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not has_rules:
        return
    uid, gid = os.geteuid(), os.getegid()
    _write(f"{mounted}.resolv.conf", "nameserver 127.0.0.1\n")
    _write(f"{mounted}.passwd", f"app:x:{uid}:{gid}::/tmp:/bin/sh\n")
    if libc.unshare(_NEW_USERS | _NEW_NETWORK | _NEW_MOUNTS | _NEW_PIDS):
        raise OSError(ctypes.get_errno(), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
    child = os.fork()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if child:
        os.closerange(3, 1024)  # whoever started us waits for the end of one of them
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _raise_loopback()
    programs = os.path.dirname(os.path.dirname(mounted))
    mounts = [("/etc/resolv.conf", f"{mounted}.resolv.conf"), ("/etc/passwd", f"{mounted}.passwd"), ("/mnt", programs)]
    for place, source in (*mounts, ("/tmp", "tmpfs"), (programs, "/mnt"), ("/proc", "proc")):
        os.makedirs(programs, exist_ok=True)  # in a /tmp that is new
        kind, flags = (None, _BIND) if source.startswith("/") else (source.encode(), 0)
        if libc.mount(source.encode(), place.encode(), kind, flags, None):
            raise OSError(ctypes.get_errno(), f"mount {place}")


def _raise_loopback() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
