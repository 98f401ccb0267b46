"""Programs that an agent of the OpenAI Agents SDK starts, leaves running and comes back to."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from agents.sandbox.errors import PtySessionNotFoundError
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from skerry import aio
from skerry.errors import SkerryError
from skerry.sandbox.processes import AsyncProcess

_MOST = 4 << 20
"""Bytes of output that are taken between two looks of the agent; then the program waits."""
_START_S = 10.0
_LOOK_S = 0.25


class Terminal:
    """One program, with what it has said since the agent looked."""

    def __init__(self, process: AsyncProcess, *, tty: bool) -> None:
        self.process = process
        self.tty = tty
        self.used_at = time.monotonic()
        self.exit_code: int | None = None
        self.error: SkerryError | None = None
        self._pieces: deque[bytes] = deque()
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._taken = 0
        self._reader = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def _read(self) -> None:
        try:
            async for _, piece in self.process:
                self._pieces.append(piece)
                self._taken += len(piece)
                self._news.set()
                if self._taken >= _MOST:
                    self._room.clear()
                    await self._room.wait()
            self.exit_code = (await self.process.wait()).exit_code
        except SkerryError as error:
            self.error = error
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # once this task is done

    async def look(self, yield_ms: int, max_tokens: int | None) -> tuple[bytes, int | None]:
        """What it says until it ends or the time is over, cut to so many tokens, and how many there were. Raises
        SkerryError if the machinery fails."""
        self.used_at = time.monotonic()
        self._taken = 0
        self._room.set()
        output, count, _ = await collect_pty_output(
            output_chunks=self._pieces,
            output_lock=self._lock,
            output_notify=self._news,
            is_done=self._reader.done,
            yield_time_ms=yield_ms,
            max_output_tokens=max_tokens,
        )
        if self.error is not None:
            raise self.error
        return output, count

    async def end(self) -> None:
        await aio.end(self._reader)
        await self.process.detach()  # a foreground program dies of it


class Terminals:
    """The programs of one session, by the numbers that the agent knows."""

    def __init__(self) -> None:
        self._open: dict[int, Terminal] = {}

    async def begin(
        self, process: AsyncProcess, *, tty: bool, yield_s: float | None, max_tokens: int | None
    ) -> PtyExecUpdate:
        """Take in a program, and look at it. Raises SkerryError."""
        terminal = Terminal(process, tty=tty)
        number = allocate_pty_process_id(set(self._open))
        self._open[number] = terminal
        await self._make_room()
        yield_ms = clamp_pty_yield_time_ms(int(1000 * (_START_S if yield_s is None else yield_s)))
        return await self._update(number, terminal, yield_ms, max_tokens)

    async def write(self, number: int, text: str, *, yield_s: float | None, max_tokens: int | None) -> PtyExecUpdate:
        """Type at a program, and look at it. Raises PtySessionNotFoundError, RuntimeError for one without a terminal,
        or SkerryError."""
        terminal = self._open.get(number)
        if terminal is None:
            raise PtySessionNotFoundError(session_id=number)
        if text and not terminal.tty:
            raise RuntimeError("stdin is not available for this process")  # the SDK knows it by these words
        if text and not terminal.has_ended:
            await terminal.process.write(text)
        yield_ms = resolve_pty_write_yield_time_ms(
            yield_time_ms=int(1000 * (_LOOK_S if yield_s is None else yield_s)), input_empty=not text
        )
        return await self._update(number, terminal, yield_ms, max_tokens)

    async def end_all(self) -> None:
        terminals, self._open = [*self._open.values()], {}
        for terminal in terminals:
            await terminal.end()

    async def _update(self, number: int, terminal: Terminal, yield_ms: int, max_tokens: int | None) -> PtyExecUpdate:
        try:
            output, count = await terminal.look(yield_ms, max_tokens)
        finally:
            if terminal.has_ended:
                self._open.pop(number, None)
                await terminal.end()
        return PtyExecUpdate(
            process_id=None if terminal.has_ended else number,
            output=output,
            exit_code=terminal.exit_code,
            original_token_count=count,
        )

    async def _make_room(self) -> None:
        """End the one that was not looked at for longest, where there are too many."""
        if len(self._open) <= PTY_PROCESSES_MAX:
            return
        known = [(number, each.used_at, each.has_ended) for number, each in self._open.items()]
        number = process_id_to_prune_from_meta(known)
        if number is not None:
            await self._open.pop(number).end()
