"""Client of the gate, for managers: starts it where there is none, and has it look at sandboxes again."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from skerry import aio
from skerry.config import Config, lasting_environment
from skerry.errors import CreateFailed, GateUnavailable, ProviderError
from skerry.gate.journal import Pulse
from skerry.host import background, locks
from skerry.model.records import Record
from skerry.model.spec import SandboxId
from skerry.net.dial import connect_unix, short_enough

MAX_LINE = 1 << 20
_ANSWER_S = 60.0
"""Longer than the gate waits for an agent."""
_GLANCE_S = 3.0
_SILENT_S = 10.0
"""Seconds without a pulse after which a gate is stuck."""
_END_S = 8.0
"""Longer than it takes to part from its boxes."""
_RETRY_S = (0.01, 0.5)
_MOST_STARTS = 4
"""Gates that may end without a word before nobody starts another."""
_BACKLOG = 1024
_log = logging.getLogger("skerry.gate")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Line to the gate: one of `look`, `forget`, `status`, `follow` and `retire`."""

    look: SandboxId | None = None
    fresh: bool = False
    """Its box was started just now: streams to the one before are of no use."""
    record: Record | None = None
    """The record of a sandbox that is being made, which nobody else has told of: the registry is not read for it."""
    secrets: dict[str, str] = {}
    offers: bool = False
    """The secrets are taken only where the gate has no value: it was killed, perhaps."""
    config: Config | None = None
    """Settings of whoever asks: they may be newer than those that the gate was started with. Of providers that of the
    sandbox alone, as the environment of whoever asks has it."""
    forget: SandboxId | None = None
    status: bool = False
    follow: bool = False
    """Tell how you are from now on, and stay for as long as somebody listens."""
    retire: bool = False
    """End, if no sandbox needs you."""


class BoxNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """How the network of one sandbox is."""

    id: SandboxId
    up: bool
    connections: int = 0
    error: str = ""
    """Why its agent was not reached last."""


class GateStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the gate is."""

    pid: int
    started_at: float
    boxes: list[BoxNetwork]
    error: str = ""
    """What it could not do last."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line from the gate."""

    error: str | None = None
    status: GateStatus | None = None
    pulse: Pulse | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a gate, told on its standard input."""

    config: Config
    note: str
    """The file that it holds locked while it lives, and in which it notes its process."""
    lock_fd: int
    listen_fd: int


class GateClient:
    """The gate of an installation, as others see it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = Path(config.state_dir) / "gate"
        self._note = self._folder / "note"
        self._socket = self._folder / "control"

    def is_running(self) -> bool:
        return background.is_held(self._note)

    def has_run(self) -> bool:
        """Whether there ever was a gate."""
        return self._folder.exists()

    def last_error(self) -> str:
        """What ended the last gate, if that was no will of anybody."""
        try:
            return (self._folder / "error").read_text(errors="replace").strip()
        except OSError:
            return ""

    async def ensure(self) -> bool:
        """Start the gate where there is none; whether that was so. It finds its sandboxes in the registry. Raises
        GateUnavailable."""
        return not self.is_running() and await self._start()

    async def look(
        self,
        id: SandboxId,
        provider: str,
        *,
        fresh: bool = False,
        record: Record | None = None,
        secrets: Mapping[str, str] | None = None,
        offers: bool = False,
    ) -> None:
        """Wait until the network of a sandbox is up and the rules in the registry hold for it, or those in the record
        of one that is being made, and have it use secrets; with `offers` those that it has no value for. Raises
        GateUnavailable."""
        config = msgspec.structs.replace(self._config, providers={provider: self._config.settings_of(provider)})
        request = Request(
            look=id, fresh=fresh, record=record, secrets=dict(secrets or {}), offers=offers, config=config
        )
        line = msgspec.json.encode(request) + b"\n"
        if len(line) > MAX_LINE:
            raise GateUnavailable("the secrets of one sandbox are larger than 1 MiB; give them as files")
        starts = 0
        try:
            async with asyncio.timeout(_ANSWER_S):
                for delay_s in aio.backoff(*_RETRY_S):
                    answer = await self._ask(line)
                    if answer is not None:
                        break
                    if starts > _MOST_STARTS:
                        raise GateUnavailable(
                            f"the gate ends as soon as it is started: {self.last_error() or 'no word'}"
                        )
                    if starts:
                        await asyncio.sleep(delay_s)
                    starts += await self._start() or not starts
        except TimeoutError:
            raise GateUnavailable(f"the gate did not answer within {_ANSWER_S:g} s") from None
        assert answer is not None
        if answer.error is not None:
            raise GateUnavailable(f"the network of sandbox {id} is not up: {answer.error}")

    async def forget(self, id: SandboxId) -> None:
        """Have a sandbox that ends forgotten. Quiet where no gate runs or answers: it looks for itself."""
        try:
            async with asyncio.timeout(_GLANCE_S):
                await self._ask(msgspec.json.encode(Request(forget=id)) + b"\n")
        except TimeoutError:
            _log.debug("the gate is not told of the end of sandbox %s: it does not answer", id)

    async def status(self) -> GateStatus | None:
        """How the gate is; None where none runs or answers."""
        try:
            async with asyncio.timeout(_GLANCE_S):
                answer = await self._ask(msgspec.json.encode(Request(status=True)) + b"\n")
        except TimeoutError:
            return None
        return None if answer is None else answer.status

    async def follow(self, told: Callable[[Pulse], None]) -> None:
        """Hear how the gate is until it ends, and keep it there until then, also when no sandbox needs it. Raises
        GateUnavailable where none answers, or one is stuck."""
        writer: asyncio.StreamWriter | None = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(_GLANCE_S):
                    await connect_unix(sock, str(self._socket))
                reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE)
                writer.write(msgspec.json.encode(Request(follow=True)) + b"\n")
                while (pulse := await _next_pulse(reader)) is not None:
                    told(pulse)
            except TimeoutError:
                raise GateUnavailable(f"the gate has said nothing for {_SILENT_S:g} s") from None
            except (OSError, ValueError) as error:  # a line that is none is a ValueError
                raise GateUnavailable(f"the gate does not say how it is: {error}") from None
            finally:
                if writer is not None:
                    writer.close()

    async def retire(self) -> None:
        """Have the gate end if no sandbox needs it, and wait until it has. Quiet where no gate runs or answers."""
        try:
            fd = os.open(self._note, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            async with asyncio.timeout(_GLANCE_S):
                answer = await self._ask(msgspec.json.encode(Request(retire=True)) + b"\n")
            if answer is not None and answer.error is None:
                await locks.wait_async(fd, _END_S, "the gate ends later")
        except (TimeoutError, ProviderError) as error:
            _log.debug("the gate may live on: %s", error or "it does not answer")
        finally:
            os.close(fd)

    async def _ask(self, line: bytes) -> Answer | None:
        """The answer to a line; None if there is no gate, or it ended before it gave one."""
        loop, text = asyncio.get_running_loop(), b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                await connect_unix(sock, str(self._socket))
                await loop.sock_sendall(sock, line)  # asyncio's streams would take longer to make than the answer
                while len(text) < MAX_LINE and (piece := await loop.sock_recv(sock, MAX_LINE)):
                    text += piece
                    if text.endswith(b"\n"):
                        return msgspec.json.decode(text, type=Answer)
            except (OSError, msgspec.DecodeError) as error:
                _log.debug("no gate answers: %s", error)
        return None

    async def _start(self) -> bool:
        try:
            return await asyncio.to_thread(self._spawn)
        except (OSError, CreateFailed) as error:
            raise GateUnavailable(f"the gate does not start, so that nothing gets out: {error}") from error

    def _spawn(self) -> bool:
        """Start a process that holds the lock and the socket, on which others may already ask; False if one lives."""
        with background.taken(self._note) as fd:
            if fd is None:
                return False
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
                self._socket.unlink(missing_ok=True)
                with short_enough(str(self._socket)) as address:
                    listener.bind(address)
                os.chmod(self._socket, 0o600)
                listener.listen(_BACKLOG)
                task = Task(config=self._config, note=str(self._note), lock_fd=fd, listen_fd=listener.fileno())
                fds, env = [fd, listener.fileno()], lasting_environment()
                said = msgspec.json.encode(task)
                background.spawn("the gate", "skerry.gate", said, fds, self._config.state_dir, env=env)
        _log.info("the gate is started")
        return True


async def _next_pulse(reader: asyncio.StreamReader) -> Pulse | None:
    """The next word of a gate; None at its end. Raises TimeoutError, OSError or ValueError."""
    async with asyncio.timeout(_SILENT_S):
        line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error is not None:
        raise ValueError(answer.error)
    return answer.pulse
