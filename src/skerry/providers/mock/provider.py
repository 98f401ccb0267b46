"""Sandboxes in memory, for tests: the real protocol, virtual time, and every fault on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from skerry.agent.guest.channel import Failure
from skerry.agent.guest.languages import ALIASES, LANGUAGES
from skerry.agent.stream import Stream
from skerry.errors import Conflict, CreateFailed, InvalidSpec, NotFound, Unsupported, WrongState
from skerry.providers.base import BoxState, BoxStatus, Capability, Enforcement, Isolation, Provider, ProviderConfig
from skerry.providers.mock.agent import uid_of
from skerry.providers.mock.clock import Clock
from skerry.providers.mock.faults import Faults
from skerry.providers.mock.filesystem import FileSystem
from skerry.providers.mock.host import Box, Host
from skerry.providers.mock.kernel import Program
from skerry.providers.mock.replies import Matcher, Replies
from skerry.spec import Network, SandboxId, Spec

_BOOT_DEADLINE_S = 30.0


@functools.cache
def _host_of_this_process() -> Host:
    return Host()


class Mock(Provider):
    """A provider that runs nothing: each box is a small Unix in memory, with a shell and some fifty programs.

    Test your own agent with it. Commands that it runs are yours to define, and time is virtual:

        mock = Mock()

        @mock.program("pytest")
        async def pytest(ctx):
            await ctx.sleep(30)
            await ctx.print("2 passed")
            return 0

        mock.reply("python", "print(6 * 7)", stdout="42\\n")

        async with AsyncSandbox(provider_object=mock, provider="mock") as sandbox:
            result = await sandbox.exec(["pytest"])            # at once, and result.duration_s == 30
            await sandbox.run_code("python", "print(6 * 7)")   # 42

    What is not defined is not there: `python3` without a program or a reply gives 127, as in a box without Python.
    There is no isolation, since only your own functions run. All images are the same; memory is what programs say
    that they use (`ctx.use_memory`); disk and pids are counted and held. Each `Mock()` has a host of its own; those
    that are loaded by name share one, so that a sandbox is found again by its id within the same program.
    """

    name = "mock"
    isolation = Isolation.NONE
    capabilities = frozenset({Capability.STOP, Capability.PAUSE, Capability.SNAPSHOT})

    def __init__(
        self, config: ProviderConfig | None = None, *, host: Host | None = None, clock: Clock | None = None
    ) -> None:
        if host is None:
            host = Host(clock=clock) if config is None else _host_of_this_process()
        self.host = host
        self.faults = Faults(self.host)

    @property
    def clock(self) -> Clock:
        return self.host.clock

    async def pass_time(self, seconds: float) -> None:
        """Let virtual time pass, for whoever waits for something to happen by itself."""
        await self.clock.advance(seconds)

    def program(self, name: str) -> Callable[[Program], Program]:
        """Register the function behind a command, for all boxes of the host; see `Context` for what it is given."""

        def register(function: Program) -> Program:
            self.host.programs[name] = function
            return function

        return register

    def reply(
        self,
        language: str,
        code: Matcher = None,
        *,
        stdout: str | bytes = "",
        stderr: str | bytes = "",
        exit_code: int = 0,
        takes_s: float = 0.0,
    ) -> None:
        """Answer code of a language: this very text, what a function of the text accepts, or (None) any.

        It holds for `run_code`, and for the interpreter called with `-c`, a file, or the code as standard input.
        """
        language = ALIASES.get(language, language)
        if language not in LANGUAGES:
            raise InvalidSpec(f"no language is called {language!r}; there are: {', '.join(sorted(LANGUAGES))}")
        names = [command[0] for command in LANGUAGES[language][1]]
        replies = self.host.programs.get(names[0])
        if not isinstance(replies, Replies):
            replies = Replies()
            for name in names:
                self.host.programs[name] = replies
        replies.add(code, stdout, stderr, exit_code, takes_s)

    async def check(self) -> None:
        return None

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        if spec.mounts:
            raise Unsupported("mounts", self.name, "its files are in memory and the host's are out of reach")
        if spec.root is not None:
            raise Unsupported("root", self.name, "its files are in memory and the host's are out of reach")
        if spec.network is Network.BRIDGE:
            raise Unsupported("network", self.name, "there is no network to join; use none or host")
        try:
            uid_of(spec.user)
        except Failure as failure:
            raise Unsupported("user", self.name, str(failure)) from None
        return dict.fromkeys(("memory", "cpus", "pids", "disk"), Enforcement(by="simulation"))

    async def create(self, id: SandboxId, spec: Spec) -> None:
        if id in self.host.boxes:
            raise Conflict(f"the mock host has a box {id} already")
        box = Box(self.host, id, spec)
        self.host.boxes[id] = box
        if self.host.next_creates:
            self.host.next_creates.pop(0)(box)
        if box.boot_s:
            await self.clock.sleep(min(box.boot_s, _BOOT_DEADLINE_S))
        if box.boot_s >= _BOOT_DEADLINE_S:
            log = "mock: booting\n"
            raise CreateFailed(f"the agent of box {id} did not answer within {_BOOT_DEADLINE_S:g} s", log=log)
        if self.host.boxes.get(id) is not box:
            raise CreateFailed(f"box {id} was destroyed while it booted")
        box.boot()

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        box = self.host.boxes.pop(id, None)
        for key in [key for key in self.host.snapshots if key[0] == id]:
            del self.host.snapshots[key]
        if box is not None:
            await box.stop(BoxState.DEAD)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {
            id: BoxStatus(state=box.state, created_at=box.created_at, labels=dict(box.spec.labels))
            for id, box in self.host.boxes.items()
        }

    async def dial(self, id: SandboxId) -> Stream:
        return self.host.box(id).dial()

    async def pause(self, id: SandboxId) -> None:
        """Freeze the box: its processes, its agent, and time as it sees it."""
        self.host.box(id).pause()

    async def resume(self, id: SandboxId) -> None:
        self.host.box(id).resume()

    async def stop(self, id: SandboxId, timeout_s: float = 10) -> None:
        """End every process; the files stay."""
        await self.host.box(id).stop()

    async def start(self, id: SandboxId) -> None:
        box = self.host.box(id)
        if box.state is BoxState.PAUSED:
            raise WrongState(f"box {id} is paused: resume it")
        if box.state is not BoxState.RUNNING:
            box.boot()

    async def snapshot(self, id: SandboxId, name: str) -> str:
        """Keep the box's files as they are now. Processes are not part of it."""
        box = self.host.box(id)
        self.host.snapshots[id, name] = (box.spec, box.files.copy())
        return name

    async def restore(self, id: SandboxId, name: str) -> None:
        """Put the files of a snapshot back, and boot anew from them; open streams end."""
        box = self.host.box(id)
        _, files = self._snapshot(id, name)
        await box.stop()
        box.files = files.copy()
        box.boot()

    async def fork(self, id: SandboxId, new_id: SandboxId, name: str) -> None:
        """A new box from a snapshot of another."""
        if new_id in self.host.boxes:
            raise Conflict(f"the mock host has a box {new_id} already")
        spec, files = self._snapshot(id, name)
        box = self.host.boxes[new_id] = Box(self.host, new_id, spec, files.copy())
        box.boot()

    def _snapshot(self, id: SandboxId, name: str) -> tuple[Spec, FileSystem]:
        if (id, name) not in self.host.snapshots:
            raise NotFound(f"box {id} has no snapshot {name!r}")
        return self.host.snapshots[id, name]
