"""Records down a call's stream: as they come, as there is room, and never holding up the loop for long."""

from __future__ import annotations

from . import wire
from .channel import Call, failure_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_BATCH = 1 << 16


class RecordSender:
    def __init__(self, call: Call, records: Iterator[dict[str, Any]], done: Callable[[], None]) -> None:
        self._call = call
        self._records = records
        self._done = done
        self._batch = b""
        self._at_end = False
        call.pump = self._pump
        self._pump()

    def _pump(self) -> None:
        """Send one batch and make the next; the loop has its turn in between."""
        call = self._call
        if not call.open:
            return
        if self._batch:
            room = call.room()
            if room <= 0:
                return
            call.send(self._batch[:room])
            self._batch = self._batch[room:]
            if self._batch:
                return
        if self._at_end:
            self._done()
            return
        try:
            self._batch = self._next_batch()
        except OSError as error:
            call.fail(failure_of(error))
            return
        call.channel.loop.soon(self._pump)

    def _next_batch(self) -> bytes:
        lines: list[bytes] = []
        size = 0
        for record in self._records:
            lines.append(wire.encode(record))
            size += len(lines[-1])
            if size >= _BATCH:
                break
        else:
            self._at_end = True
        return b"".join(lines)
