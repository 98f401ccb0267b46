"""Channels: one stream to the host each, with frames in, frames out, and the calls that are open on it."""

from __future__ import annotations

import posix
from _collections import deque

from . import wire
from .loop import READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .plain import PlainDialect

    Buffer = bytes | bytearray | memoryview

UP_WINDOW = 4 << 20
DEFAULT_WINDOW = 1 << 20
_CONGESTED = 1 << 20
_MAX_QUEUED = 64 << 20
_IOV_MAX = 64
_MAX_CALLS = 1024
_buffer = bytearray(1 << 18)  # read buffer of all channels: its content is used up before the next read

LOOKING = frozenset(
    {"hello", "ping", "unused", "metrics", "processes", "interpreters", "service", "service_log"}
    | {"network", "resolved", "refuse"}
)
"""Calls that only look: a box that is watched is still idle."""


class Failure(Exception):
    """Error to answer with, of a kind that PROTOCOL.md names."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def failure_of(error: OSError, path: str = "") -> Failure:
    """Turn an error of the system into an answer."""
    import errno

    kinds = {
        "not_found": (errno.ENOENT,),
        "exists": (errno.EEXIST,),
        "denied": (errno.EACCES, errno.EPERM),
        "read_only": (errno.EROFS,),
        "not_a_directory": (errno.ENOTDIR,),
        "is_a_directory": (errno.EISDIR,),
        "not_empty": (errno.ENOTEMPTY,),
        "not_regular": (errno.ENXIO, errno.ENODEV),
        "loop": (errno.ELOOP,),
        "name_too_long": (errno.ENAMETOOLONG,),
        "no_space": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "limit": (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM),
        "invalid": (errno.EINVAL,),
        "unsupported": (errno.EOPNOTSUPP,),
    }
    where = path or error.filename or ""
    if isinstance(where, bytes):
        where = where.decode("utf-8", "replace")
    text = f"{where}: {error.strerror}" if where else str(error.strerror)
    other = "io" if where else "failed"
    return Failure(next((kind for kind, numbers in kinds.items() if error.errno in numbers), other), text)


class OpenFile:
    """A descriptor that closes when nothing refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.shrank = False

    def __del__(self) -> None:
        posix.close(self.fd)


class FilePart:
    """Piece of a file in the output queue; the kernel copies it, we do not."""

    def __init__(self, file: OpenFile, offset: int, count: int) -> None:
        self.file = file
        self.offset = offset
        self.count = count

    def __len__(self) -> int:
        return self.count


class Call:
    """A request from its arrival to its answer, with its two byte streams."""

    def __init__(self, channel: Channel, id: int, method: str, params: dict[str, Any], attachment: Buffer) -> None:
        self.channel = channel
        self.id = id
        self.method = method
        self.params = params
        self.attachment = attachment
        window = params.get("window", DEFAULT_WINDOW)
        self.credit = window if type(window) is int and window > 0 else DEFAULT_WINDOW
        self.up_window = UP_WINDOW
        self.unacknowledged = 0
        self.open = True
        self.pump: Callable[[], None] | None = None
        self.on_data: Callable[[memoryview], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_cancel: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self.ref: Any = None  # the call's process, which a later call on the same stream may name by this call's id

    def room(self) -> int:
        """Count of the bytes that may go down now."""
        return 0 if self.channel.queued > _CONGESTED else self.credit

    def send(self, data: Buffer | FilePart, fd: int = 1) -> None:
        """Send bytes down; the caller keeps within `room`."""
        count = len(data)
        self.credit -= count
        self.channel.send({"method": "data", "params": {"id": self.id, "fd": fd}, "bytes": count}, data)

    def send_end(self) -> None:
        self.channel.send({"method": "end", "params": {"id": self.id}})

    def acknowledge(self, count: int) -> None:
        """Give credit for bytes that came up and are consumed, not for every little piece."""
        self.unacknowledged += count
        if self.unacknowledged >= self.up_window // 4 and self.open:
            self.channel.send({"method": "credit", "params": {"id": self.id, "bytes": self.unacknowledged}})
            self.unacknowledged = 0

    def answer(self, result: dict[str, Any]) -> None:
        if self.open:
            self.close()
            self.channel.send({"jsonrpc": "2.0", "id": self.id, "result": result})

    def fail(self, failure: Failure) -> None:
        if self.open:
            self.close()
            error = {"code": -32000, "message": str(failure), "data": {"kind": failure.kind}}
            self.channel.send({"jsonrpc": "2.0", "id": self.id, "error": error})

    def close(self) -> None:
        self.open = False
        # What a handler holds (files above all) must go with the call, not with the next garbage collection.
        self.pump = self.on_data = self.on_end = self.on_cancel = self.on_close = self.ref = None
        self.channel.calls.pop(self.id, None)
        if self.method not in LOOKING:
            self.channel.last_use = self.channel.loop.now()


class Channel:
    def __init__(
        self,
        loop: Loop,
        read_fd: int,
        write_fd: int,
        dispatch: Callable[[Call], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        self.loop = loop
        self.calls: dict[int, Call] = {}
        self.queued = 0
        self.last_use = 0.0
        self.greeted = False
        self.open = True
        self._plain: PlainDialect | None = None
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._dispatch = dispatch
        self._on_close = on_close
        self._parser = wire.Parser()
        self._out: deque[memoryview | FilePart | Callable[[], None]] = deque()
        for fd in {read_fd, write_fd}:
            posix.set_blocking(fd, False)
        loop.watch(read_fd, READ, self._on_ready)

    def send(self, message: dict[str, Any], attachment: Buffer | FilePart | None = None) -> None:
        if not self.open:
            return
        line = wire.encode(message)
        self._out.append(memoryview(line))
        self.queued += len(line)
        if attachment is not None and len(attachment):
            self._out.append(attachment if isinstance(attachment, FilePart) else memoryview(attachment))
            self.queued += len(attachment)
        self.loop.at_end_of_turn(self._flush)

    def when_sent(self, action: Callable[[], None]) -> None:
        """Call `action` once all that is queued up to here has gone out."""
        self._out.append(action)
        self.loop.at_end_of_turn(self._flush)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE and self.open:
            self._receive()

    def _receive(self) -> None:
        try:
            count = posix.readv(self._read_fd, [_buffer])
            if not count:
                self.close()
                return
            for message, attachment in self._parser.feed(memoryview(_buffer)[:count]):
                self._on_frame(message, attachment)
                if self.queued > _MAX_QUEUED:  # it asks for answers and takes none
                    self.close()
                if not self.open:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except Exception:  # the stream is broken, or what it says is: both end it, and the agent lives on
            self.close()

    def _on_frame(self, message: dict[str, Any], attachment: Buffer) -> None:
        if not self.greeted and self._plain is None and message.get("method") != "hello":
            from .plain import PlainDialect

            self._plain = PlainDialect(self, self._parser, self._dispatch)
        if self._plain is not None:
            self._plain.on_request(message)
            return
        method, params, id = message.get("method"), message.get("params", {}), message.get("id")
        if type(method) is not str or type(params) is not dict:
            raise wire.ProtocolError("a frame has a method and an object of params")
        if id is None:
            self._on_notification(method, params, attachment)
        elif type(id) is not int or id in self.calls:
            raise wire.ProtocolError("an id is an integer that is not in use")
        else:
            call = Call(self, id, method, params, attachment)
            if len(self.calls) >= _MAX_CALLS:
                call.fail(Failure("limit", f"more than {_MAX_CALLS} calls are open on this stream"))
                return
            self.calls[id] = call
            self._dispatch(call)

    def _on_notification(self, method: str, params: dict[str, Any], attachment: Buffer) -> None:
        id = params.get("id", -1)
        if type(id) is not int:
            raise wire.ProtocolError("an id is an integer")
        call = self.calls.get(id)
        if call is None:
            return
        if method == "data":
            if call.on_data is not None:
                call.on_data(memoryview(attachment))
            else:
                call.acknowledge(len(attachment))
        elif method == "credit":
            count = params.get("bytes", 0)
            if type(count) is int and count > 0:
                call.credit += count
                if call.pump is not None:
                    call.pump()
        elif method == "end" and call.on_end is not None:
            call.on_end()
        elif method == "cancel" and call.on_cancel is not None:
            call.on_cancel()
        elif method == "cancel":
            if call.on_close is not None:
                call.on_close()
            call.fail(Failure("cancelled", "cancelled"))

    def _flush(self) -> None:
        if not self.open:
            return
        was_congested = self.queued > _CONGESTED
        try:
            while self._out:
                first = self._out[0]
                if isinstance(first, memoryview):
                    self._send_bytes()
                elif isinstance(first, FilePart):
                    self._send_file_part(first)
                else:
                    self._out.popleft()
                    first()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        self._watch()
        if was_congested and self.queued <= _CONGESTED:
            for call in list(self.calls.values()):
                if call.pump is not None:
                    call.pump()

    def _watch(self) -> None:
        if self._read_fd == self._write_fd:
            self.loop.watch(self._read_fd, READ | WRITE if self._out else READ, self._on_ready)
        elif self._out:
            self.loop.watch(self._write_fd, WRITE, self._on_ready)
        else:
            self.loop.forget(self._write_fd)

    def _send_bytes(self) -> None:
        parts: list[memoryview] = []
        for part in self._out:
            if not isinstance(part, memoryview) or len(parts) == _IOV_MAX:
                break
            parts.append(part)
        sent = posix.writev(self._write_fd, parts)
        self.queued -= sent
        for part in parts:
            if sent < len(part):
                self._out[0] = part[sent:]
                break
            sent -= len(part)
            self._out.popleft()

    def _send_file_part(self, part: FilePart) -> None:
        try:
            sent = posix.sendfile(self._write_fd, part.file.fd, part.offset, part.count)
        except (BlockingIOError, InterruptedError):
            raise
        except OSError:
            sent = 0  # not a file that the kernel can send, or the stream is broken: a copy will tell
        if sent == 0:
            data = posix.pread(part.file.fd, part.count, part.offset)
            part.file.shrank = len(data) < part.count
            self._out[0] = memoryview(data.ljust(part.count, b"\0"))  # the length was promised
            return
        self.queued -= sent
        part.offset += sent
        part.count -= sent
        if not part.count:
            self._out.popleft()

    def close(self) -> None:
        """End the stream: every open call is told, and nothing more is sent."""
        if not self.open:
            return
        self.open = False
        for fd in {self._read_fd, self._write_fd}:
            self.loop.forget(fd)
            posix.close(fd)
        self._out.clear()
        for call in list(self.calls.values()):
            on_close = call.on_close
            call.close()
            if on_close is not None:
                self.loop.soon(on_close)  # each by itself: one that fails must not keep the others from it
        self._on_close(self)
