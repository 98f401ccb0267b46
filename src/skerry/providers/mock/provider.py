"""Sandboxes in memory, for tests: the real protocol, virtual time, and every fault on demand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from skerry.agent.guest.channel import Failure
from skerry.agent.guest.languages import ALIASES, LANGUAGES
from skerry.agent.stream import Stream
from skerry.errors import (
    Conflict,
    CreateFailed,
    InvalidSpec,
    NotFound,
    ProviderUnavailable,
    Unsupported,
    WrongState,
)
from skerry.providers.base import (
    OPTIONAL_FIELDS,
    BoxChange,
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    Isolation,
    Provider,
    ProviderConfig,
    Snapshot,
    Volume,
)
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
    that they use (`ctx.use_memory`); disk and pids are counted and held; volumes are folders that several boxes see;
    `host.images["name"] = "another id"` makes the boxes of an image outdated. Each `Mock()` has a host of its own;
    those that are loaded by name share one, so that a sandbox is found again by its id within the same program.
    """

    name = "mock"
    isolation = Isolation.NONE
    capabilities = frozenset(
        {
            Capability.STOP,
            Capability.PAUSE,
            Capability.SNAPSHOT,
            Capability.WATCH,
            Capability.VOLUMES,
            Capability.LOGS,
        }
    )
    honours = OPTIONAL_FIELDS - {"root"}  # its files are in memory, and the host's are out of reach

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
        files = None if spec.snapshot is None else self._files_of(spec.snapshot).copy()
        box = Box(self.host, id, spec, files)
        self.host.boxes[id] = box
        self.host.tell(id)
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
        if box is not None:
            await box.stop(BoxState.DEAD)
        if volumes:
            self.host.volumes.remove_of(id)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {id: box.status() for id, box in self.host.boxes.items()}

    async def dial(self, id: SandboxId) -> Stream:
        return self.host.box(id).dial()

    async def pause(self, id: SandboxId) -> None:
        """Freeze the box: its processes, its agent, and time as it sees it."""
        self.host.box(id).pause()

    async def resume(self, id: SandboxId) -> None:
        self.host.box(id).resume()

    async def stop(self, id: SandboxId) -> None:
        """End every process; the files stay."""
        await self.host.box(id).stop()

    async def start(self, id: SandboxId, spec: Spec | None = None) -> None:
        """Without a spec, as by somebody's hand: it has what it was made with."""
        box = self.host.box(id)
        if box.state is BoxState.PAUSED:
            raise WrongState(f"box {id} is paused: resume it")
        if box.state is not BoxState.RUNNING:
            box.spec = spec or box.spec
            box.boot()

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        """Keep the box's files as they are now. Processes and volumes are not part of it."""
        box = self.host.box(id)
        if name in self.host.snapshots:
            raise Conflict(f"the mock host has a snapshot {name!r} already")
        files = box.files.copy()
        snapshot = Snapshot(name=name, id=f"{name}:1", sandbox=id, size=files.used, created_at=self.clock.now)
        self.host.snapshots[name] = (snapshot, files)
        return snapshot

    async def snapshots(self) -> Sequence[Snapshot]:
        return [snapshot for snapshot, _ in self.host.snapshots.values()]

    async def remove_snapshot(self, name: str) -> None:
        self._files_of(name)
        if any(box.spec.snapshot == name for box in self.host.boxes.values()):
            raise Conflict(f"the snapshot {name!r} is used by a box")
        del self.host.snapshots[name]

    def _files_of(self, snapshot: str) -> FileSystem:
        if snapshot not in self.host.snapshots:
            raise NotFound(f"the mock host has no snapshot {snapshot!r}")
        return self.host.snapshots[snapshot][1]

    async def watch(self) -> AsyncIterator[BoxChange]:
        changes: asyncio.Queue[BoxChange | None] = asyncio.Queue()
        for id, box in self.host.boxes.items():
            changes.put_nowait(BoxChange(id=id, status=box.status()))
        self.host.watchers.add(changes)
        try:
            while (change := await changes.get()) is not None:
                yield change
        finally:
            self.host.watchers.discard(changes)
        raise ProviderUnavailable(self.name, "the mock was told to end the watch", fix="watch again")

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return self.host.volumes.all(*self._users(), sizes=sizes)

    async def remove_volume(self, name: str) -> None:
        self.host.volumes.remove(name, *self._users())

    def _users(self) -> tuple[list[Spec], list[SandboxId]]:
        return [box.spec for box in self.host.boxes.values()], list(self.host.boxes)

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        box = self.host.box(id)
        lines = bytes(box.log).splitlines(keepends=True)
        yield b"".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])
        told = len(box.log)
        changes: asyncio.Queue[BoxChange | None] = asyncio.Queue()
        self.host.watchers.add(changes)
        try:
            while follow and box.state in (BoxState.RUNNING, BoxState.PAUSED):
                await changes.get()
                if len(box.log) > told:
                    yield bytes(box.log[told:])
                    told = len(box.log)
        finally:
            self.host.watchers.discard(changes)
