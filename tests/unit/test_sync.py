"""The synchronous twin: complete, generated, and honest about Ctrl-C, threads and forks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skerry.agent import tunnel
from skerry.sandbox import files, interpreter, network, ports, processes, sandbox, service, watches
from skerry.sync import api
from skerry.sync.loop_thread import LoopThread

ROOT = Path(__file__).parents[2]
PAIRS = [
    (sandbox.AsyncSandbox, api.Sandbox),
    (files.AsyncFiles, api.Files),
    (watches.AsyncWatch, api.Watch),
    (watches.AsyncKeptWatch, api.KeptWatch),
    (processes.AsyncProcess, api.Process),
    (processes.AsyncProcesses, api.Processes),
    (interpreter.AsyncInterpreter, api.Interpreter),
    (interpreter.AsyncInterpreters, api.Interpreters),
    (tunnel.AsyncTunnel, api.Tunnel),
    (ports.AsyncForward, api.Forward),
    (service.AsyncService, api.Service),
    (network.AsyncSandboxNetwork, api.SandboxNetwork),
]
SPECIAL = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
INTERNAL = {
    ("AsyncForward", "links"), ("AsyncForward", "serve"), ("AsyncProcess", "start"), ("AsyncProcess", "input"),
    ("AsyncWatch", "begin"), ("AsyncTunnel", "open"),
    ("AsyncSandbox", "of_record"), ("AsyncSandbox", "of_box"), ("AsyncSandbox", "follow"),
    ("AsyncSandbox", "tell"),
}  # fmt: skip


def test_the_file_is_what_the_generator_writes() -> None:
    argv = [sys.executable, str(ROOT / "scripts/generate_sync"), "--check"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


def public(cls: type) -> dict[str, Any]:
    return {name: each for name, each in vars(cls).items() if name in SPECIAL or not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    function = function.__func__ if isinstance(function, classmethod) else function
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("twin", "own"), PAIRS, ids=lambda cls: cls.__name__)
def test_every_async_method_has_a_twin_with_the_same_parameters(twin: type, own: type) -> None:
    for name, member in public(twin).items():
        if (twin.__name__, name) in INTERNAL:
            continue
        other = inspect.getattr_static(own, SPECIAL.get(name, name), None)
        assert other is not None, f"{own.__name__} has no {name}"
        if isinstance(member, property):
            assert isinstance(other, property)
            continue
        assert parameters(other) == parameters(member), name
        assert not inspect.iscoroutinefunction(other), name
        if name not in SPECIAL:
            plain = member.__func__ if isinstance(member, classmethod) else member
            other = other.__func__ if isinstance(other, classmethod) else other
            expected = (plain.__doc__ or "").replace("async ", "").replace("await ", "")
            assert expected.split() == (other.__doc__ or "").split(), name


@pytest.mark.parametrize(("twin", "own"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_twin_has_nothing_of_its_own(twin: type, own: type) -> None:
    extra = {name for name in vars(own) if not name.startswith("_")} - set(vars(twin))
    held = {"files", "processes", "service", "network", "interpreters"}
    told = {"id", "spec", "enforced", "created_at", "number", "pid", "name", "language", "engine", "cwd"}
    assert extra <= held | told


# the loop_thread


def run_program(program: str, timeout_s: float = 10) -> str:
    """What a program prints; it and all that it forked is gone afterwards."""
    argv = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            return process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            return "it hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


def test_it_works_from_many_threads_at_once() -> None:
    loop_thread = LoopThread()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda i: loop_thread.run(value(i)), range(200))) == list(range(200))


def test_an_error_comes_out_as_it_is() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LoopThread().run(fail())


def test_ctrl_c_cancels_the_work_and_waits_for_its_end() -> None:
    loop_thread, log = LoopThread(), []
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)  # such as a sandbox that is being destroyed
            log.append("cleared up")

    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        begun.wait(10)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(work())
    interrupter.join()
    assert log == ["cleared up"]


def test_an_iterator_is_closed_when_its_loop_is_left() -> None:
    loop_thread, log = LoopThread(), []

    async def numbers() -> AsyncIterator[int]:
        try:
            for i in range(100):
                yield i
        finally:
            log.append("closed")

    iterator = loop_thread.iterate(numbers())
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert log == ["closed"]
    assert list(loop_thread.iterate(numbers())) == list(range(100))


def test_a_child_after_a_fork_has_a_loop_of_its_own() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from skerry.sync.loop_thread import LoopThread\n"
        "loop_thread = LoopThread()\n"
        "async def f(): return os.getpid()\n"
        "assert loop_thread.run(f()) == os.getpid()\n"
        "pid = os.fork()\n"
        "ok = loop_thread.run(f()) == os.getpid()\n"
        "if pid == 0: os._exit(0 if ok else 1)\n"
        "print(os.waitpid(pid, 0)[1], ok)\n"
    )
    assert run_program(program) == "0 True\n"


def test_a_fork_while_another_thread_uses_the_loop_thread_does_not_hang_the_child() -> None:
    program = (
        "import asyncio, os, threading\n"
        "from skerry.sync.loop_thread import LoopThread\n"
        "loop_thread = LoopThread()\n"
        "async def f(): return 1\n"
        "stop = threading.Event()\n"
        "def busy():\n"
        "    while not stop.is_set(): loop_thread._running_loop()\n"
        "threads = [threading.Thread(target=busy) for _ in range(4)]\n"
        "[t.start() for t in threads]\n"
        "codes = []\n"
        "for _ in range(30):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        loop_thread.run(f()); os._exit(0)\n"
        "    codes.append(os.waitpid(pid, 0)[1])\n"
        "stop.set()\n"
        "print(set(codes))\n"
    )
    assert run_program(program) == "{0}\n"


def test_used_inside_a_running_loop_it_does_not_deadlock() -> None:
    loop_thread = LoopThread()

    async def main() -> int:
        return loop_thread.run(value(3))

    assert asyncio.run(main()) == 3


def test_used_from_its_own_loop_it_says_so_instead_of_hanging() -> None:
    """A callback of ours (on_stdout) runs in the loop: a synchronous call there would wait for itself."""
    program = (
        "import asyncio\n"
        "from skerry.sync.loop_thread import LoopThread\n"
        "loop_thread = LoopThread()\n"
        "async def inner(): return 1\n"
        "async def outer():\n"
        "    work = inner()\n"
        "    try: loop_thread.run(work)\n"
        "    except Exception as error: print(type(error).__module__)\n"
        "    finally: work.close()\n"
        "loop_thread.run(outer())\n"
    )
    assert run_program(program, 5) in ("skerry.errors\n", "builtins\n")


async def test_a_coroutine_of_another_loop_gets_the_result_and_the_error() -> None:
    async def work() -> object:
        return asyncio.get_running_loop()

    async def failing() -> None:
        raise ValueError("it fails")

    loop_thread = LoopThread()
    assert await loop_thread.lend(work()) is not asyncio.get_running_loop()
    with pytest.raises(ValueError, match="it fails"):
        await loop_thread.lend(failing())


async def test_cancelling_a_coroutine_of_another_loop_waits_for_the_end_of_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    task = asyncio.create_task(LoopThread().lend(work()))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
