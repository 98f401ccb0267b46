"""The mock's agent: the real protocol, answered from a machine in memory."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

from skerry import caches
from skerry.agent.guest.channel import LOOKING, Failure
from skerry.agent.guest.languages import ALIASES, LANGUAGES
from skerry.agent.guest.spawn import env_of
from skerry.providers.mock.channel import Call, Channel, Handler
from skerry.providers.mock.files import FileCalls
from skerry.providers.mock.jobs import Job, Terminal, size_of
from skerry.providers.mock.kernel import Alarm, Machine
from skerry.providers.mock.programs import USERS
from skerry.providers.mock.stream import MemoryStream
from skerry.spec import Spec
from skerry.version import __version__

HOME = "/home/user"
_KEPT_ENDED = 64
_CHUNK = 1 << 16


class Agent:
    """Answers every method of PROTOCOL.md for one box."""

    def __init__(self, machine: Machine, spec: Spec, end_box: Callable[[], None]) -> None:
        self.machine = machine
        self.clock = machine.clock
        self.started = machine.clock.now
        self.uid = uid_of(spec.user)
        self.home = HOME
        self.cwd = spec.cwd or HOME
        self.env = {"PATH": "/usr/bin:/bin", "HOME": HOME, "USER": "user", "LANG": "C.UTF-8"}
        self.env |= {**caches.environment(spec), **spec.env}
        self.channels: set[Channel] = set()
        self.jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._end_box = end_box
        self._lifetime: Alarm | None = None
        self._idle: Alarm | None = None
        self._idle_s: float | None = None
        self._last_use = self.clock.now
        self._measured = (self.clock.now, 0.0)
        files = FileCalls(machine, HOME, self.uid)
        self._handlers: dict[str, Handler] = {
            "hello": self._hello, "ping": self._ping, "exec": self._exec, "exec_code": self._exec_code,
            "attach": self._attach, "processes": self._processes, "signal": self._signal, "resize": self._resize,
            "metrics": self._metrics, "connect": self._connect, "set_lifetime": self._change_lifetime,
            "set_env": self._set_env,
            "sync_clock": self._sync_clock, "shutdown": self._shutdown, **files.handlers,
        }  # fmt: skip
        self._set_lifetime(spec.lifetime_s)
        self._set_idle(spec.idle_s)

    def serve(self, stream: MemoryStream, *, garbage: bool, hangs: bool) -> None:
        handlers = {
            name: handler if name in LOOKING else self._used(handler) for name, handler in self._handlers.items()
        }
        channel = Channel(stream, handlers, garbage=garbage)
        channel.hangs = hangs
        channel.on_close = lambda: self.channels.discard(channel)
        if self.machine.paused:
            channel.freeze()
        self.channels.add(channel)

    def _used(self, handler: Handler) -> Handler:
        async def noted(call: Call) -> dict[str, Any]:
            self._last_use = self.clock.now
            try:
                return await handler(call)
            finally:
                self._last_use = self.clock.now

        return noted

    async def _hello(self, call: Call) -> dict[str, Any]:
        return {"protocol": 1, "agent": __version__, "pid": 1, "started": self.started}

    async def _ping(self, call: Call) -> dict[str, Any]:
        return {}

    async def _exec(self, call: Call) -> dict[str, Any]:
        params = call.params
        argv, shell = params.get("argv"), params.get("shell")
        if isinstance(shell, str) and argv is None:
            argv = ["sh", "-c", shell]
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv) or not argv[0]:
            raise Failure("invalid", "argv is a list of at least one text, or shell is a text")
        return await self._run(call, argv)

    async def _exec_code(self, call: Call) -> dict[str, Any]:
        language = str(call.params.get("language")).lower()
        language = ALIASES.get(language, language)
        if language not in LANGUAGES:
            raise Failure("invalid", f"no language is called {language!r}; there are: {', '.join(sorted(LANGUAGES))}")
        suffix, commands = LANGUAGES[language]
        name = next((command[0] for command in commands if command[0] in self.machine.programs), None)
        if name is None:
            tried = " or ".join(command[0] for command in commands)
            raise Failure("no_interpreter", f"the box has no interpreter for {language}: {tried} is not on its PATH")
        path = f"/tmp/code-{next(self._numbers)}{suffix}"
        self.machine.files.replace(os.fsencode(path), call.attachment, self.uid)

        def clean_up() -> None:
            if self.machine.files.exists(os.fsencode(path)):
                self.machine.files.remove(os.fsencode(path))

        return await self._run(call, [name, path], clean_up)

    async def _run(self, call: Call, argv: list[str], clean_up: Callable[[], None] = lambda: None) -> dict[str, Any]:
        try:
            job = self._start(call.params, argv)
        except BaseException:
            clean_up()
            raise
        if job.process is not None:
            job.process.on_end.append(clean_up)
        else:
            clean_up()
        if job.background:
            return {"process": job.number, "pid": job.info()["pid"]}
        call.on_cancel = job.abandon
        try:
            return await self._wait_for(call, job)
        finally:
            if not job.ended:
                job.abandon()
            self.jobs.pop(job.number, None)

    async def _wait_for(self, call: Call, job: Job) -> dict[str, Any]:
        """Follow a job as one who waits, so that time may jump."""
        self.clock.open_calls += 1
        self.clock.poke()
        try:
            result = await job.follow(call)
            await call.flushed()
            return result
        finally:
            self.clock.open_calls -= 1

    def _start(self, params: dict[str, Any], argv: list[str]) -> Job:
        timeout_s, limit = params.get("timeout_s"), params.get("limit")
        for name, value in (("timeout_s", timeout_s), ("limit", limit)):
            if value is not None and (type(value) not in (int, float) or value < 0):
                raise Failure("invalid", f"{name} is a number that is not negative")
        env = params.get("env") or {}
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise Failure("invalid", "env is an object of texts")
        uid = self._user(params.get("user"))
        job = Job(next(self._numbers), params, stdin=bool(params.get("stdin")))
        job.argv = argv
        job.started = self.clock.now
        cwd = self._folder(params.get("cwd") or self.cwd)
        terminal = {"TERM": "xterm"} if job.pty else {}
        try:
            process = self.machine.spawn(
                list(argv), env={**self.env, **terminal, **env}, cwd=cwd, uid=uid, fds=job.files()
            )
        except FileNotFoundError:
            job.failed_to_start(127, f"{argv[0]}: not found")
        except OSError as problem:
            if problem.errno == 11:
                raise Failure("limit", f"cannot start a process: {problem.strerror}") from None
            job.failed_to_start(126, f"{argv[0]}: cannot run: {problem.strerror}")
        else:
            job.watch(self.machine, process, timeout_s)
        self.jobs[job.number] = job
        for ended in [number for number, old in self.jobs.items() if old.ended][:-_KEPT_ENDED]:
            del self.jobs[ended]
        return job

    def _folder(self, path: str) -> bytes:
        full = os.path.join(self.cwd, os.path.join(self.home, path[2:]) if path in ("~",) or path[:2] == "~/" else path)
        try:
            if not self.machine.files.find(os.fsencode(full), self.uid).is_dir:
                raise Failure("denied", f"cwd {full}: Not a directory")
        except FileNotFoundError:
            raise Failure("not_found", f"cwd {full}: No such file or directory") from None
        return self.machine.files.real(os.fsencode(full), self.uid)

    def _user(self, user: object) -> int:
        if user is None:
            return self.uid
        uid = uid_of(str(user))
        if uid != self.uid and self.uid != 0:
            raise Failure("unsupported", f"this box runs everything as uid {self.uid}; it cannot become {user!r}")
        return uid

    def _job(self, call: Call) -> Job:
        if "call" in call.params:
            other = call.channel.calls.get(call.params["call"])
            if other is None or not isinstance(other.process, Job):
                raise Failure("no_process", "that call has no process, or it has ended")
            return other.process
        job = self.jobs.get(call.params.get("process", -1))
        if job is None:
            raise Failure("no_process", f"no process has the number {call.params.get('process')}")
        return job

    async def _attach(self, call: Call) -> dict[str, Any]:
        return await self._wait_for(call, self._job(call))

    async def _processes(self, call: Call) -> dict[str, Any]:
        return {"processes": [job.info() for job in self.jobs.values()]}

    async def _signal(self, call: Call) -> dict[str, Any]:
        number = call.params.get("signal")
        if type(number) is not int or not 1 <= number <= 64:
            raise Failure("invalid", "signal is a number from 1 to 64")
        self._job(call).send_signal(number)
        return {}

    async def _resize(self, call: Call) -> dict[str, Any]:
        terminal = self._job(call).input
        if not isinstance(terminal, Terminal):
            raise Failure("invalid", "this process has no terminal")
        terminal.resize(size_of(call.params))
        return {}

    async def _metrics(self, call: Call) -> dict[str, Any]:
        machine, files, now = self.machine, self.machine.files, self.clock.now
        since, before = self._measured
        self._measured = now, machine.cpu_s
        return {
            "uptime_s": now - self.started,
            "cpu_percent": round(100 * (machine.cpu_s - before) / max(now - since, 0.001), 1),
            "cpu_s": round(machine.cpu_s, 2),
            "memory_bytes": machine.memory_used + (1 << 20),
            "disk": {"total": files.capacity, "used": files.used, "free": files.capacity - files.used},
            "processes": machine.process_count,
            "load": 0.0,
        }

    async def _connect(self, call: Call) -> dict[str, Any]:
        if call.params.get("host", "127.0.0.1") not in ("127.0.0.1", "localhost", "::1"):
            raise Failure("denied", "host is a loopback address of the box")
        listener = self.machine.listeners.get(call.params.get("port", -1))
        if listener is None:
            raise Failure("refused", "nothing answers on that port in the box: Connection refused")
        up, down = listener.connect()
        up.writer.retain()
        down.reader.retain()

        async def send_up() -> None:
            while chunk := await call.read():
                await up.writer.write(None, chunk)
            up.writer.release()

        async def send_down() -> None:
            while chunk := await down.reader.read(None, _CHUNK):
                await call.send(chunk)
            call.send_end()

        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(send_up())
                both.create_task(send_down())
        finally:
            up.writer.closed()
            down.reader.closed()
        return {}

    async def _set_env(self, call: Call) -> dict[str, Any]:
        self.env.update(env_of(call.params))
        return {"env": self.env}

    async def _change_lifetime(self, call: Call) -> dict[str, Any]:
        for name in ("lifetime_s", "idle_s"):
            value = call.params.get(name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < 1e10):
                raise Failure("invalid", f"{name} is a positive number of seconds, or null for never")
        if "lifetime_s" in call.params:
            self._set_lifetime(call.params["lifetime_s"])
        if "idle_s" in call.params:
            self._set_idle(call.params["idle_s"])
        return {"lifetime_s": self._lifetime.left if self._lifetime else None, "idle_s": self._idle_s}

    def _set_lifetime(self, seconds: float | None) -> None:
        if self._lifetime is not None:
            self._lifetime.cancel()
        self._lifetime = Alarm(self.machine, seconds, self._end_box, pulls=False) if seconds else None

    def _set_idle(self, seconds: float | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle_s = seconds or None
        self._idle = Alarm(self.machine, seconds, self._check_idle, pulls=False) if seconds else None

    def _check_idle(self) -> None:
        if self._idle_s is None:
            return
        if any(not job.ended for job in self.jobs.values()) or any(channel.calls for channel in self.channels):
            self._last_use = self.clock.now
        self._last_use = max([self._last_use, *(job.ended_at for job in self.jobs.values())])
        left = self._last_use + self._idle_s - self.clock.now
        if left <= 0:
            self._end_box()
        else:
            self._idle = Alarm(self.machine, left, self._check_idle, pulls=False)

    async def _sync_clock(self, call: Call) -> dict[str, Any]:
        raise Failure("denied", "a mock box shares the clock of its host")

    async def _shutdown(self, call: Call) -> dict[str, Any]:
        asyncio.get_running_loop().call_soon(self._end_box)
        return {}


def uid_of(user: str | None) -> int:
    name = (user or "user").partition(":")[0]
    if not name.isdigit() and name not in USERS:
        raise Failure("not_found", f"no user is called {name!r} in the box")
    return int(name) if name.isdigit() else USERS[name]
