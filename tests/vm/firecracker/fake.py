"""A stand-in for `firecracker`: the same arguments, the same answers, the same ways to die.

It is run by a small script beside which `faults.json` may name another version to be, and requests in the middle of
whose answer it dies. README.md says which versions of the real one were seen to do what it does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import sys
from typing import Any, NoReturn

from fake_bodies import Fault
from fake_guest import Guest
from fake_vm import MAX_PAYLOAD, VERSION, FakeVm
from swagger import Description

_MAX_CONNECTIONS = 10
_FULL = b'{ "error": "Too many open connections" }'
_METHODS = ("GET", "PUT", "PATCH", "DELETE")
_QUIET = ("Off", "Error", "Warn", "Warning")
_DROPPED = "\nAll previous unanswered requests will be dropped."


class Server:
    """The API's HTTP, with one request after the other."""

    def __init__(self, vm: FakeVm, requests: _File, faults: dict[str, Any], *, is_quiet: bool) -> None:
        self._vm = vm
        self._is_quiet = is_quiet
        self._requests = requests
        self._faults = faults
        self._open: set[asyncio.StreamWriter] = set()
        self._turn = asyncio.Lock()

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            head = b"HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(_FULL) + _FULL)
            writer.close()
            return
        self._open.add(writer)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        size = _content_length(head)
        body = await reader.readexactly(size)
        if method not in _METHODS:
            return await _protocol_error(writer, "Invalid HTTP Method: Unsupported HTTP method.")
        if size > MAX_PAYLOAD:
            told = f"Request payload with size {size} is larger than the limit of {MAX_PAYLOAD} allowed by server."
            return await _protocol_error(writer, told)
        self._requests += [f"{method} {path}"]
        if not self._is_quiet:
            print(f'[{self._vm.id}:fc_api] The API server received a {method.title()} request on "{path}".', flush=True)
        async with self._turn:
            try:
                status, reply = await self._vm.answer(method, path, body)
            except Fault as fault:
                await _send(writer, 400, str(fault))
                _exit(f"RunWithApiError error: Failed to build MicroVM: {fault}", 1)
        if self._faults.get("die_at") == f"{method} {path}":
            writer.write(b"HTTP/1.1 400 \r\nServer: Fire")
            await writer.drain()
            _exit("the stand-in was told to die here", 1)
        await _send(writer, status, reply)
        return True


def _content_length(head: Any) -> int:
    for line in head[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(value)
    return 0


async def _send(writer: asyncio.StreamWriter, status: int, reply: str) -> None:
    text = reply.encode()
    length = b"" if status == 204 else b"Content-Length: %d\r\nContent-Type: application/json\r\n" % len(text)
    writer.write(
        b"HTTP/1.1 %d \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n" % status + length + b"\r\n" + text
    )
    await writer.drain()


async def _protocol_error(writer: asyncio.StreamWriter, message: str) -> bool:
    await _send(writer, 400, '{ "error": "' + message + _DROPPED + '" }')
    return False


def _exit(words: str, code: int) -> NoReturn:
    print(words, file=sys.stderr, flush=True)
    os._exit(code)


def _arguments() -> tuple[argparse.Namespace, bool]:
    parser = argparse.ArgumentParser(prog="firecracker", allow_abbrev=False)
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    parser.add_argument("--id", default="anonymous-instance")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--level", default="Info")
    for told_by_the_jailer in ("--start-time-us", "--start-time-cpu-us", "--parent-cpu-time-us"):
        parser.add_argument(told_by_the_jailer)
    return parser.parse_args(), "FAKE_JAIL" in os.environ


def _faults(home: str) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError), open(os.path.join(home, "faults.json")) as file:
        return dict(json.load(file))
    return {}


async def _run(home: str, options: argparse.Namespace, is_jailed: bool) -> None:
    with open(os.path.join(home, "api.json")) as file:
        description = Description(json.load(file))
    faults = _faults(home)
    agent, guests = os.path.join(home, "guest", "start.py"), os.path.join(home, "guests")
    shuts_down_s = faults.get("shuts_down_s", 0.0)
    guest = Guest(agent, guests, lambda code: _exit("Firecracker exiting", code), shuts_down_s)
    if faults.get("kvm") is False:
        guest.boot = lambda *_: _exit("KVM_EXIT_INTERNAL_ERROR", 1)  # type: ignore[method-assign]
    if faults.get("restores") is False:
        guest.bind = _refuse_to_bind  # type: ignore[method-assign]
    vm = FakeVm(options.id, description, guest, is_jailed, faults.get("version", VERSION))
    vm.violations = _File(os.path.join(home, "violations"))  # type: ignore[assignment]
    path = vm.path(options.api_sock)
    if os.path.exists(path):
        _exit(f"Failed to open the API socket at: {path}. Check that it is not already used.", 1)
    is_quiet = options.level in _QUIET
    server = Server(vm, _File(os.path.join(home, "requests")), faults, is_quiet=is_quiet)
    await asyncio.start_unix_server(server.accepted, path, backlog=128)
    if not is_quiet:
        print(f"[{options.id}:fc_api] API server started.", flush=True)
    await asyncio.get_running_loop().create_future()


async def _refuse_to_bind(_path: str) -> None:
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class _File:
    """A list of lines that others can read, whoever we run as."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iadd__(self, lines: Any) -> _File:
        with open(self._path, "a") as file:
            file.writelines(f"{line}\n" for line in lines)
        return self


def main(home: str) -> None:
    options, is_jailed = _arguments()
    if options.version:
        print(f"Firecracker v{_faults(home).get('version', VERSION)}\n")
        return
    asyncio.run(_run(home, options, is_jailed))
