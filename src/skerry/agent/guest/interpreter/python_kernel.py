"""`python3 python_kernel.py`: a Python that remembers, for a box whose own Python has no Jupyter. It runs one cell
after the other in one module, on the descriptor 3: JSON lines, requests in and events out. All else that is written to
the descriptors 1 and 2, by whomever, is caught by the context that started us."""

import ast
import builtins
import importlib
import linecache
import os
import signal
import sys
import textwrap
import traceback
import types

package = types.ModuleType("skerry_agent")
package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["skerry_agent"] = package
sys.path[0] = ""  # as in any interactive Python, and none of our neighbours shadows a module
from skerry_agent.python_shows import (  # type: ignore[import-not-found]  # noqa: E402
    bundle_of,
    is_figure,
    shorten,
)  # fmt: skip
from skerry_agent.python_wire import Stream, Wire, interrupts  # type: ignore[import-not-found]  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HIGH = 700  # code that closes all descriptors up to some hundreds does not mean ours
_HERE = package.__path__[0] + "/"
_MAX_TRACEBACK = 1 << 16
_MAX_VALUE = 8 << 20  # agents of some frameworks hand out what they have found by raising it
_COROUTINE = 0x80


class StdinNotImplementedError(NotImplementedError):
    """What `input()` raises: nobody types here."""


class Plots(types.ModuleType):
    """A backend of matplotlib that shows figures as results of the cell."""

    def __getattr__(self, name: str) -> "Any":
        if name != "FigureCanvas":
            raise AttributeError(name)
        agg: Any = importlib.import_module("matplotlib.backends.backend_agg")

        class Manager(agg.FigureCanvasAgg.manager_class):  # type: ignore[misc]
            @classmethod
            def pyplot_show(cls, **_: "Any") -> None:
                show_figures()

            def show(self) -> None:
                show_figures()

        self.FigureCanvas = type("FigureCanvas", (agg.FigureCanvasAgg,), {"manager_class": Manager})
        return self.FigureCanvas

    @staticmethod
    def show(*_: "Any", **__: "Any") -> None:
        show_figures()


def show_figures() -> None:
    """Show all figures that are open, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    try:
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
    finally:
        pyplot.close("all")


def display(*values: object, raw: bool = False, **_: "Any") -> None:
    """Show each value in all the forms that it has; with `raw` each is a dictionary of media types already."""
    for value in values:
        data, metadata = (dict(value), {}) if raw and isinstance(value, dict) else bundle_of(value)
        kernel.show("display", data, metadata)


def refuse_input(prompt: object = "", *_: object, **__: object) -> str:
    asked = f" (asked for: {str(prompt)[:200]!r})" if str(prompt) else ""
    raise StdinNotImplementedError("input() is not possible here: nobody types. Give the value in the code" + asked)


def run_shell(command: str) -> None:
    """`!command` of a cell."""
    import subprocess

    code = subprocess.call(command, shell=True)  # noqa: S602 (as its user typed it)
    if code:
        print(f"[exit code {code}]", file=sys.stderr)


def run_magic(line: str) -> None:
    """`%pip`, `%cd` and the few others that make sense here."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "pip":
        run_shell(f"'{sys.executable}' -m pip {rest}")
    elif name == "cd":
        os.chdir(os.path.expanduser(rest or "~"))
    elif name == "env":
        key, _, value = rest.partition("=")
        os.environ[key.strip()] = value.strip()
    elif name not in ("matplotlib", "config", "load_ext", "autoreload"):
        raise NameError(f"this Python has no magic %{name}; install ipykernel in the image to have all")


def translate(code: str) -> str:
    """Lines that begin with `!` or `%`, as calls."""
    lines = []
    for line in code.split("\n"):
        bare = line.lstrip()
        if bare[:1] in ("!", "%") and bare[1:2].strip():
            call = "__shell__" if bare[0] == "!" else "__magic__"
            line = f"{line[: len(line) - len(bare)]}{call}({bare[1:]!r})"
        lines.append(line)
    return "\n".join(lines)


class Kernel:
    """The module that cells run in, and their running."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.module = types.ModuleType("__main__")
        self.module.__dict__.update(__builtins__=builtins, display=display, __shell__=run_shell, __magic__=run_magic)
        self._loop: Any = None
        self._number = 0

    def show(self, event: str, data: "dict[str, Any]", metadata: "dict[str, Any]") -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.wire.send(event, data=data, metadata=metadata)

    def run(self, code: str, number: int) -> str:
        """Run a cell; returns `ok` or `error`."""
        self._number = number
        try:
            try:
                interrupts.is_running = True
                self._execute(code, f"<cell {number}>")
                show_figures()
            finally:
                interrupts.is_running = False
        except BaseException as error:
            self._tell(error)
            return "error"
        return "ok"

    def _execute(self, code: str, name: str) -> None:
        try:
            tree = ast.parse(code, name)
        except IndentationError:
            code = textwrap.dedent(code)
            tree = ast.parse(code, name)
        except SyntaxError:
            if not any(line.lstrip()[:1] in ("!", "%") for line in code.split("\n")):
                raise
            code = translate(code)
            tree = ast.parse(code, name)
        linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        last = tree.body[-1] if tree.body else None
        last = tree.body.pop() if isinstance(last, ast.Expr) else None
        if tree.body:
            self._evaluate(tree, name, "exec")
        if last is not None:
            value = self._evaluate(ast.Expression(last.value), name, "eval")  # type: ignore[attr-defined]
            if value is not None and not code.rstrip().endswith(";"):
                builtins._ = value  # type: ignore[attr-defined]
                self.show("result", *bundle_of(value))
                if is_figure(value) and "matplotlib.pyplot" in sys.modules:
                    sys.modules["matplotlib.pyplot"].close(value)

    def _evaluate(self, tree: "Any", name: str, mode: str) -> object:
        code = compile(tree, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if not code.co_flags & _COROUTINE:
            return eval(code, self.module.__dict__)  # noqa: S307 (what we are for)
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(eval(code, self.module.__dict__))  # noqa: S307
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            raise

    def _tell(self, error: BaseException) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        kind = type(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        try:
            value = str(error)
            told = traceback.TracebackException(kind, error, trace)
            told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(_HERE)]
            text = "".join(told.format())
        except BaseException as other:  # its own __str__ fails
            value, text = f"<{type(other).__name__} while telling>", ""
        text = shorten(text, _MAX_TRACEBACK)
        self.wire.send("error", name=kind.__name__, value=shorten(value, _MAX_VALUE), traceback=text)


def mend_descriptors(kept: "list[int]") -> None:
    """Give back the descriptors that a cell has closed."""
    for number, fd in enumerate(kept):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(fd, number)


def keep_descriptors() -> "list[int]":
    import fcntl

    try:
        return [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in (0, 1, 2)]
    except OSError:
        return [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64) for number in (0, 1, 2)]


def prepare(wire: Wire) -> "tuple[Stream, Stream]":
    signal.signal(signal.SIGINT, interrupts)
    streams = (Stream(wire, "stdout", 1), Stream(wire, "stderr", 2))
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
    builtins.input = refuse_input
    builtins.display = display  # type: ignore[attr-defined]
    sys.modules["getpass"] = getpass = types.ModuleType("getpass")
    getpass.getpass = refuse_input  # type: ignore[attr-defined]
    getpass.getuser = lambda: os.environ.get("USER") or str(os.getuid())  # type: ignore[attr-defined]
    sys.modules["_skerry_plots"] = Plots("_skerry_plots")
    os.environ.setdefault("MPLBACKEND", "module://_skerry_plots")
    sys.modules["__main__"] = kernel.module
    sys.argv = [""]

    def flush() -> None:
        for stream in streams:
            stream.flush()

    def forked() -> None:
        wire.leave()
        for stream in streams:
            stream.forget()

    os.register_at_fork(before=flush, after_in_child=forked)
    return streams


def serve(wire: Wire) -> None:
    streams = prepare(wire)
    kept = keep_descriptors()
    wire.send("ready", engine="builtin", version=sys.version.split()[0])
    while True:
        request = wire.receive()
        mend_descriptors(kept)
        signal.signal(signal.SIGINT, interrupts)  # the cell before may have put in another
        os.environ.update(request["added"])
        before = {name: os.environ.get(name) for name in request["env"]}
        os.environ.update(request["env"])
        wire.send("started")
        status = kernel.run(request["code"], request["number"])
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        for stream in streams:
            stream.flush()
        if not wire.is_ours:
            os._exit(0)  # a process that the cell forked comes to the end of it
        sys.stdout, sys.stderr = streams
        wire.send("done", status=status)


wire = Wire(3)
kernel = Kernel(wire)
if __name__ == "__main__":
    from importlib.util import find_spec

    if sys.argv[1:] == ["auto"] and find_spec("jupyter_client") and find_spec("ipykernel"):
        os.dup2(wire.socket.fileno(), 3)
        here = os.path.dirname(os.path.abspath(__file__))
        os.execv(sys.executable, [sys.executable, os.path.join(here, "jupyter_kernel.py"), "python"])
    try:
        serve(wire)
    except (EOFError, OSError):
        os._exit(0)
