"""`python3 jupyter_kernel.py LANGUAGE`: a kernel of Jupyter's behind the interface of our own, by the jupyter_client of
the box's Python. JSON lines on the descriptor 3: requests in, events out. SIGINT is passed on to the kernel."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_START_S = 90
_POLL_S = 0.5
_MAX_TEXT = 1 << 18
_AFTER_S = 10
_NAMES = {"javascript": ("javascript", "jslab", "deno"), "typescript": ("typescript", "tslab", "deno"), "r": ("ir",)}
_SET = {
    "python": ("import os; os.environ[{name}] = {value}", "import os; os.environ.pop({name}, None)"),
    "bash": ("export {bare}={quoted}", "unset {bare}"),
    "javascript": ("process.env[{name}] = {value};", "delete process.env[{name}];"),
    "typescript": ("process.env[{name}] = {value};", "delete process.env[{name}];"),
    "r": ("Sys.setenv({bare} = {value})", "Sys.unsetenv({name})"),
    "java": ("System.setProperty({name}, {value});", "System.clearProperty({name});"),
}
"""How a variable is set and unset, by language."""


class Wire:
    """The descriptor to our context, which the kernel does not inherit."""

    def __init__(self, fd: int) -> None:
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(fd)
        self._socket = socket.socket(fileno=own)
        self._received = b""

    def send(self, event: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({**fields, "event": event}, default=str).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next request. Raises EOFError."""
        while b"\n" not in self._received:
            data = self._socket.recv(1 << 18)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]


class Kernel:
    """A kernel of Jupyter's, with the channels to it."""

    def __init__(self, wire: Wire, language: str) -> None:
        self.wire = wire
        self.language = language
        try:
            jupyter = importlib.import_module("jupyter_client")
        except ImportError:
            ours = "python, bash and javascript need python3, bash and node on its PATH, others jupyter_client"
            raise LookupError(f"the box has no interpreter for {language!r}: {ours}") from None
        name = _spec_of(jupyter.kernelspec.KernelSpecManager(), language)
        if name is None:
            raise LookupError(f"no kernel of Jupyter's in the box is for {language!r}")
        self.manager = jupyter.KernelManager(kernel_name=name, transport="ipc")  # TCP is open to others
        environment = {**os.environ}
        if environment.get("MPLBACKEND", "").startswith("module://_skerry"):
            del environment["MPLBACKEND"]
        self.manager.start_kernel(env=environment, preexec_fn=_die_with_parent)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_START_S)
        if language == "python":
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python_forms.py")
            code = f"__import__('runpy').run_path({path!r})['teach_jupyter']()"
            self._follow(self.client.execute(code, silent=True, store_history=False), silent=True)
        self.is_running = False
        signal.signal(signal.SIGINT, lambda *_: self.manager.interrupt_kernel() if self.is_running else None)

    def run(self, code: str) -> str:
        """Run a cell, and tell what happens; returns `ok` or `error`. Raises EOFError if the kernel dies."""
        self.is_running = True
        try:
            id = self.client.execute(code, allow_stdin=False, stop_on_error=False)
            return self._follow(id)
        finally:
            self.is_running = False

    def set_env(self, env: dict[str, str | None]) -> None:
        """Set variables in the kernel, or unset them, as far as we know how in its language."""
        lines = list(_lines(self.language, env))
        if lines:
            self._follow(self.client.execute("\n".join(lines), silent=True, store_history=False), silent=True)

    def _follow(self, id: str, *, silent: bool = False) -> str:
        status = "ok"
        queue = importlib.import_module("queue")
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=_POLL_S)
            except queue.Empty:
                if not self.manager.is_alive():
                    raise EOFError from None
                continue
            if message["parent_header"].get("msg_id") != id:
                if message["msg_type"] == "stream":
                    self._tell("stream", message["content"])  # a thread of an earlier cell
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                self._await_reply(id, queue.Empty)
                return status
            if kind == "error":
                status = "error"
            if not silent:
                self._tell(kind, content)

    def _await_reply(self, id: str, empty: type[Exception]) -> None:
        end = time.monotonic() + _AFTER_S
        while time.monotonic() < end:
            try:
                if self.client.get_shell_msg(timeout=_POLL_S)["parent_header"].get("msg_id") == id:
                    return
            except empty:
                if not self.manager.is_alive():
                    raise EOFError from None

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            text = content["text"]
            for at in range(0, len(text), _MAX_TEXT):
                self.wire.send(content["name"], text=text[at : at + _MAX_TEXT])
        elif kind in ("display_data", "update_display_data", "execute_result"):
            event = "result" if kind == "execute_result" else "display"
            self.wire.send(event, data=content["data"], metadata=content.get("metadata") or {})
        elif kind == "error":
            text = _plain("\n".join(content.get("traceback") or []))
            self.wire.send("error", name=content["ename"], value=content["evalue"], traceback=text)


def _plain(text: str) -> str:
    """Text without colours."""
    import re

    return re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", text)


def _spec_of(manager: Any, language: str) -> str | None:
    """Find the name of a kernel for a language: one that is called so, or that says it speaks it."""
    specs = manager.get_all_specs()
    for name in (language, *(("python3",) if language == "python" else ()), *_NAMES.get(language, ())):
        if name in specs:
            return name  # type: ignore[no-any-return]
    for name, found in sorted(specs.items()):
        if str(found["spec"].get("language", "")).lower() == language:
            return str(name)
    return None


def _lines(language: str, env: dict[str, str | None]) -> Iterator[str]:
    forms = _SET.get(language)
    for name, value in env.items() if forms else ():
        if forms and name.isidentifier():
            form = forms[1] if value is None else forms[0]
            quoted = "'" + (value or "").replace("'", "'\\''") + "'"
            yield form.format(name=json.dumps(name), value=json.dumps(value), bare=name, quoted=quoted)


def _die_with_parent() -> None:
    """Have the kernel end with us, however we end."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_as(provisioner: Any) -> None:
    """End as the kernel did, so that our context can tell how that was."""
    code = provisioner.process.poll() if provisioner is not None and provisioner.process is not None else None
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def main() -> None:
    sys.path[0] = ""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire = Wire(3)
    try:
        kernel = Kernel(wire, sys.argv[1])
    except Exception as error:  # whatever it is, the one who waits is told
        missing = isinstance(error, LookupError)
        wire.send("failed", reason=str(error)[:1000], kind="no_interpreter" if missing else "failed")
        return
    wire.send("ready", engine="jupyter")
    known = dict(os.environ)
    try:
        while True:
            request = wire.receive()
            known.update(request["added"])
            kernel.set_env({**request["added"], **request["env"]})
            wire.send("started")
            status = kernel.run(request["code"])
            kernel.set_env({name: known.get(name) for name in request["env"]})
            wire.send("done", status=status)
    except (EOFError, OSError):
        _end_as(kernel.manager.provisioner)


main()
