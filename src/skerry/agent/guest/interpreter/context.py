"""`context.py CONFIG`: a context of an interpreter. It starts a kernel, in which state is kept, gives it one run after
the other, catches all that it and its children write, interrupts it, ends what takes too long and starts it again.

Requests are JSON lines on stdin, each with an `id` of its own; events are JSON lines on stdout, each between two line
feeds, so that who comes late finds the beginning of one. The kernel speaks JSON lines on a socket, its descriptor 3."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import time

package = type(sys)("skerry_agent")  # the folder may be mounted anywhere, under any name
package.__path__ = [__file__.rpartition("/")[0] or "."]
sys.modules["skerry_agent"] = package
from skerry_agent.runs import (  # type: ignore[import-not-found]  # noqa: E402
    CHUNK,
    Output,
    Run,
    count_ooms,
    take_lines,
    to_json,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_MAX_LINE = 24 << 20
"""Bytes of one event of a kernel, such as a picture in base64."""
_MAX_LATE = 1 << 16
"""Letters that are kept of what is written between two runs."""
_CONGESTED = 4 << 20
_MAX_QUEUE = 64
_INSIST_S = 1.0
_INSISTENCES = 10
"""Interrupts after a timeout, until the kernel is killed."""
_SHOWN = ("result", "display", "error")


class Context:
    def __init__(self, config: dict[str, Any]) -> None:
        self.argv: list[str] = config["argv"]
        self.is_bash = self.argv[-1].endswith("bash_kernel.sh")
        self.out_fd = os.dup(1)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 1)
        os.set_inheritable(self.out_fd, False)
        os.set_blocking(self.out_fd, False)
        os.set_blocking(0, False)
        self.outputs = (Output("stdout"), Output("stderr"))
        self._out: list[bytes] = []
        self._out_size = 0
        self._in = bytearray()
        self.queue: list[Run] = []
        self.current: Run | None = None
        self.late: list[tuple[str, str]] = []
        self.count = 0
        self.death: dict[str, Any] | None = None
        self.is_ready = False
        self.waiting_for_start: list[str] = []
        self.pid = 0
        self.kernel: socket.socket | None = None
        self._from_kernel = bytearray()
        self._ooms = 0
        wake_read, wake_write = os.pipe()
        self.wake_fd = wake_read
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    # the kernel

    def start(self) -> None:
        near, far = socket.socketpair()
        self._ooms = count_ooms()
        pid = os.fork()
        if pid == 0:
            self._become_kernel(far.detach())
        far.close()
        near.setblocking(False)
        self.kernel, self.pid = near, pid
        self._from_kernel.clear()
        self.is_ready, self.death = False, None

    def _become_kernel(self, fd: int) -> None:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.set_inheritable(fd, True)
            null = os.open("/dev/null", os.O_RDONLY)
            if fd != 3:
                os.dup2(fd, 3)
            os.dup2(null, 0)
            os.dup2(self.outputs[0].write_fd, 1)
            os.dup2(self.outputs[1].write_fd, 2)
            os.closerange(4, 256)
            os.execvp(self.argv[0], self.argv)
        except OSError as error:
            os.write(2, f"{self.argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def send_to_kernel(self, run: Run) -> None:
        assert self.kernel is not None
        if self.is_bash:
            data = b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in self._for_bash(run))
        else:
            asked = {"code": run.code, "number": run.number, "env": run.env, "added": run.added}
            data = json.dumps(asked).encode() + b"\n"
        self.kernel.setblocking(True)
        self.kernel.settimeout(30)
        try:
            self.kernel.sendall(data)
        except OSError:  # it has gone, or does not read: its end is told when it comes
            self.kill()
        finally:
            self.kernel.setblocking(False)

    def _for_bash(self, run: Run) -> tuple[str, str, str]:
        """What is done before the code, the code, and what is done after it."""
        os.environ.update(run.added)  # of which it has a copy, from its start
        before = {**run.added, **run.env}
        after = {name: os.environ.get(name) for name in run.env}
        return _exports(before), run.code.replace("\0", ""), _exports(after)

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except OSError:
                pass

    def reap(self) -> None:
        """Look whether the kernel has ended, and then tell of its death."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.pid and self.death is None:
                self._read_kernel()
                self.drain()
                died = os.WIFSIGNALED(status)
                self.bury(
                    signal=os.WTERMSIG(status) if died else None,
                    exit_code=None if died else os.WEXITSTATUS(status),
                    out_of_memory=count_ooms() > self._ooms,
                )

    def bury(self, **death: Any) -> None:
        self.death = {"reason": None, **death} if self.death is None else self.death
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None
        try:
            os.killpg(self.pid, signal.SIGKILL)  # what it has left behind
        except OSError:
            pass
        if self.current is not None:
            self.finish("dead")
        while self.queue:
            self.current = self.queue.pop(0)
            self.finish("dead")
        self.answer_starters()

    def answer_starters(self) -> None:
        for id in self.waiting_for_start:
            self.emit(id, "end", status="ok" if self.death is None else "dead", **self.state())
        self.waiting_for_start.clear()

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "death": self.death, "busy": self.current is not None}

    # runs

    def next(self) -> None:
        """Begin the next run, if nothing runs."""
        if self.current is not None or not self.queue or (not self.is_ready and self.death is None):
            return
        run = self.current = self.queue.pop(0)
        if self.death is not None:
            self.finish("dead")
            return
        self.count += 1
        run.number = self.count
        self.emit(run.id, "started", count=run.number)
        for name, text in self.late:
            self.write(name, text)
        self.late.clear()
        if run.timeout_s:
            run.next_blow = time.monotonic() + run.timeout_s
        self.send_to_kernel(run)

    def finish(self, status: str) -> None:
        run, self.current = self.current, None
        assert run is not None
        if status == "error" and run.is_interrupted:
            status = "interrupted"
        more = {"death": self.death} if status == "dead" else {}
        self.emit(
            run.id, "end", status=status, count=run.number, truncated=run.truncated, timed_out=run.timed_out, **more
        )
        self.next()

    def interrupt(self, run: Run) -> None:
        run.is_interrupted = True
        if run.has_started or self.is_bash:
            try:
                os.killpg(self.pid, signal.SIGINT)
            except OSError:
                pass

    def strike(self) -> None:
        """Interrupt the run whose time is over, and again while it goes on; at last kill it."""
        run, now = self.current, time.monotonic()
        if run is None or run.next_blow is None or now < run.next_blow:
            return
        run.timed_out = run.timed_out or run.client is not None
        run.blows += 1
        run.next_blow = now + _INSIST_S
        if run.blows > _INSISTENCES:
            self.kill()
        else:
            self.interrupt(run)

    # events

    def emit(self, id: str, event: str, **fields: Any) -> None:
        text = to_json({"id": id, "event": event, **fields})
        line = b"\n" + text.encode("utf-8", "replace") + b"\n"
        self._out.append(line)
        self._out_size += len(line)

    def write(self, name: str, text: str) -> None:
        run = self.current
        if run is None:
            if sum(len(each) for _, each in self.late) < _MAX_LATE:
                self.late.append((name, text[:_MAX_LATE]))
            return
        if len(text) > run.left[name]:
            run.truncated = True
            text = text[: run.left[name]]
        run.left[name] -= len(text)
        if text:
            self.emit(run.id, name, text=text)

    def drain(self) -> None:
        """Pass on what is in the pipes by now, which is before what the kernel tells next."""
        for output in self.outputs:
            for _ in range(2):
                text = output.read()
                if text is None:
                    break
                self.write(output.name, text)

    def _read_kernel(self) -> None:
        while self.kernel is not None:
            try:
                data = self.kernel.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.kernel.close()
                self.kernel = None
                if self.death is None and self.is_ready:
                    self.kill()  # it has closed the wire, and is of no use any more; its end comes with SIGCHLD
                return
            self._from_kernel += data
            for line in take_lines(self._from_kernel):
                self.on_event(line)
            if len(self._from_kernel) > _MAX_LINE:
                self._from_kernel[:] = b"!"  # no JSON, whatever its end is
                if self.current is not None:
                    self.current.truncated = True
            if self._out_size > _CONGESTED:
                return

    def on_event(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            event = message.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return
        self.drain()
        run = self.current
        if event in ("stdout", "stderr"):
            self.write(event, str(message.get("text", "")))
        elif event == "ready":
            self.is_ready = True
            self.late.clear()  # what it has said on its way is nobody's
            self.answer_starters()
            self.next()
        elif event == "failed":
            self.bury(reason=str(message.get("reason"))[:4096], kind=str(message.get("kind"))[:64])
            self.kill()
        elif run is None:
            return
        elif event == "started":
            run.has_started = True
            if run.is_interrupted:
                self.interrupt(run)
        elif event == "done":
            self.finish(str(message.get("status", "ok")))
        elif event in _SHOWN:
            run.displayed_left -= len(line)
            if run.displayed_left < 0:
                run.truncated = True
            else:
                self.emit(run.id, event, **{name: message[name] for name in message if name != "id"})

    # requests

    def on_input(self) -> bool:
        """Take requests; False at their end."""
        while True:
            try:
                data = os.read(0, CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._in += data
            for line in take_lines(self._in):
                try:
                    self.on_request(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue

    def on_request(self, request: dict[str, Any]) -> None:
        op = request["op"]
        if op == "run":
            self.queue.append(Run(request))
            if len(self.queue) > _MAX_QUEUE:
                self.emit(self.queue.pop().id, "end", status="busy", count=0)
            self.next()
        elif op == "leave":
            self.leave(request["client"])
        elif op == "interrupt":
            if self.current is not None:
                self.interrupt(self.current)
            self.emit(request["id"], "end", status="ok", **self.state())
        elif op == "restart":
            self.restart(request["id"])
        elif op == "ready":
            self.waiting_for_start.append(request["id"])
            if self.is_ready or self.death is not None:
                self.answer_starters()

    def leave(self, client: object) -> None:
        """Nobody waits any more for what this client wanted."""
        self.queue = [run for run in self.queue if run.client != client]
        run = self.current
        if run is not None and run.client == client:
            run.client = None
            run.next_blow = time.monotonic()

    def restart(self, id: str) -> None:
        if self.death is None:
            self.kill()
            self.bury(reason="it was started again")
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        self.drain()
        self.late.clear()
        self.count = 0
        self.waiting_for_start.append(id)
        self.start()

    # the loop

    def run(self) -> None:
        self.start()
        while True:
            self._flush()
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(self.wake_fd, select.POLLIN)
            if self._out:
                poll.register(self.out_fd, select.POLLOUT)
            if self._out_size <= _CONGESTED:
                for output in self.outputs:
                    poll.register(output.fd, select.POLLIN)
                if self.kernel is not None:
                    poll.register(self.kernel.fileno(), select.POLLIN)
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            if self.wake_fd in ready:
                os.read(self.wake_fd, 1 << 12)
                self.reap()
            if self.kernel is not None and self.kernel.fileno() in ready:
                self._read_kernel()
            if ready & {output.fd for output in self.outputs}:
                self.drain()
            if 0 in ready and not self.on_input():
                self.kill()
                return
            self.strike()

    def _patience_ms(self) -> float | None:
        run = self.current
        if run is None or run.next_blow is None:
            return None
        left_s: float = run.next_blow - time.monotonic()
        return max(0.0, left_s) * 1000 + 1

    def _flush(self) -> None:
        while self._out:
            whole = b"".join(self._out)
            self._out.clear()
            try:
                written = os.write(self.out_fd, whole)
            except OSError as error:
                is_gone = error.errno not in (errno.EAGAIN, errno.EINTR)  # nobody is there any more
                written = len(whole) if is_gone else 0
            self._out_size = len(whole) - written
            if self._out_size:
                self._out.append(whole[written:])
                return


def _exports(env: Mapping[str, str | None]) -> str:
    """Commands that set variables, or unset them. Names that no shell takes are left out."""
    lines = []
    for name, value in env.items():
        if name.isidentifier():
            quoted = None if value is None else value.replace("'", "'\\''")
            lines.append(f"unset {name}" if quoted is None else f"export {name}='{quoted}'")
    return "\n".join(lines)


if __name__ == "__main__":
    Context(json.loads(sys.argv[1])).run()
