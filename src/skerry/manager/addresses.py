"""Addresses of sandboxes on this host's loopback, each served by a forwarder: a process that belongs to the sandbox and
not to the program which started it. Whoever finds it gone starts another."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry import clock
from skerry.config import Config, lasting_environment
from skerry.errors import CreateFailed, InvalidSpec, PortTaken, SkerryError, Unsupported
from skerry.host import background
from skerry.model.records import Record
from skerry.model.spec import LOOPBACK, Port, SandboxId, Spec
from skerry.model.states import State

_CHOSEN = range(20000, 32768)
"""Below the ports that kernels take for connections of their own, so that none of those is in the way when a forwarder
comes back."""
_TRIES = 200
_BACKLOG = 128
_log = logging.getLogger("skerry.manager")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a forwarder, told on its standard input."""

    id: SandboxId
    provider: str
    config: Config
    note: str
    """The file that it holds locked while it lives, and in which it notes its process."""
    lock_fd: int
    listeners: dict[int, int]
    """The sandbox's port for each descriptor that listens."""


class Reserved(NamedTuple):
    """Ports of this host that are kept for a sandbox which is being made, each with a socket that listens."""

    ports: tuple[Port, ...] = ()
    listeners: tuple[socket.socket, ...] = ()


class Addresses:
    """Forwarders of an installation's sandboxes."""

    def __init__(self, config: Config, *, is_shared: bool) -> None:
        """`is_shared`: another process finds and reaches the sandboxes of this manager, by the configuration alone."""
        self._config = config
        self._is_shared = is_shared
        self._folder = Path(config.state_dir) / "forwarders"

    def check(self, spec: Spec) -> None:
        """Raise Unsupported if nobody could serve the ports of a spec."""
        if spec.ports and not self._is_shared:
            reason = "its registry or provider is an object of this program, which no other has; use `expose`"
            raise Unsupported("ports", spec.provider, reason)

    @contextmanager
    def reserved(self, spec: Spec, others: Iterable[Record]) -> Iterator[Reserved]:
        """Listen on the ports of a spec, before anything is made for it. Raises PortTaken or InvalidSpec."""
        if not spec.ports:
            yield Reserved()
            return
        made = [each for each in others if each.state is not State.CREATING]  # of two that are made one gets to listen
        taken = {port.local: each.id for each in made for port in each.spec.ports if port.local is not None}
        listeners: list[socket.socket] = []
        ports = []
        try:
            for port in spec.ports:
                listener = _choose(taken) if port.local is None else _listen(port.local, taken)
                listeners.append(listener)
                ports.append(Port(port=port.port, local=listener.getsockname()[1]))
            yield Reserved(tuple(ports), tuple(listeners))
        finally:
            for listener in listeners:
                listener.close()

    async def start(self, record: Record, reserved: Reserved) -> None:
        """Start the forwarder of a sandbox that was just made. Raises CreateFailed."""
        if reserved.ports:
            await asyncio.to_thread(self._start, record, reserved)

    async def ensure(self, records: Sequence[Record]) -> None:
        """Start the forwarders that are not there, of sandboxes of this machine. What cannot be is told in the log: a
        port that somebody else took meanwhile keeps nobody from using the sandbox."""
        here = clock.machine_id()
        for record in records:
            is_made = record.is_live and not record.doomed and record.state is not State.CREATING
            if is_made and _has_address(record.spec) and record.owner.host.partition("/")[0] == here:
                if not self._is_shared or background.is_held(self._note(record.id)):
                    continue
                try:
                    await asyncio.to_thread(self._start_again, record)
                except (SkerryError, OSError) as error:
                    _log.warning("the addresses of sandbox %s are not served: %s", record.id, error)

    async def end(self, record: Record) -> None:
        """End the forwarder of a sandbox; quiet if there is none."""
        if record.spec.ports and self._note(record.id).exists():
            await asyncio.to_thread(background.end, self._note(record.id), f"the forwarder of sandbox {record.id}")

    def _note(self, id: SandboxId) -> Path:
        return self._folder / id

    def _start_again(self, record: Record) -> None:
        with self.reserved(record.spec, ()) as reserved:
            self._start(record, reserved)
        _log.info("the addresses of sandbox %s are served again", record.id)

    def _start(self, record: Record, reserved: Reserved) -> None:
        """Start a process that holds the lock and the sockets."""
        note = self._note(record.id)
        try:
            with background.taken(note) as fd:
                if fd is None:
                    return  # another program was quicker, or has just ended it
                pairs = zip(reserved.ports, reserved.listeners, strict=True)
                numbers = {listener.fileno(): port.port for port, listener in pairs}
                task = Task(
                    id=record.id,
                    provider=record.spec.provider,
                    config=self._config,
                    note=str(note),
                    lock_fd=fd,
                    listeners=numbers,
                )
                module, fds, env = "skerry.manager.forwarder", [fd, *numbers], lasting_environment()
                said = msgspec.json.encode(task)
                background.spawn("the forwarder of its ports", module, said, fds, record.id, env=env)
        except OSError as error:
            raise CreateFailed(f"the forwarder of its ports did not start: {error}") from error


def _has_address(spec: Spec) -> bool:
    return bool(spec.ports) and all(port.local is not None for port in spec.ports)


def _choose(taken: Mapping[int, SandboxId]) -> socket.socket:
    for _ in range(_TRIES):
        number = random.choice(_CHOSEN)
        if number not in taken:
            with suppress(PortTaken):
                return _listen(number, taken)
    raise PortTaken(f"ports: no free port was found from {_CHOSEN[0]} to {_CHOSEN[-1]}; say which one to take")


def _listen(number: int, taken: Mapping[int, SandboxId]) -> socket.socket:
    if number in taken:
        raise PortTaken(f"ports: port {number} of this host is sandbox {taken[number]}'s; choose another, or none")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, number))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"ports: port {number} of this host is in use; choose another, or none") from None
        raise InvalidSpec(f"ports: port {number} of this host: {error.strerror}", field="ports") from None
    return listener
