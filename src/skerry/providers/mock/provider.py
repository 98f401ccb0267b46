"""Sandboxes for tests: the real agent, virtual time, and every fault on demand."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from skerry import errors
from skerry.agent.guest.channel import Failure
from skerry.agent.guest.execution import ALIASES, LANGUAGES
from skerry.model import caches
from skerry.model.spec import IMAGE_COMMAND, Cache, Network, SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers import base
from skerry.providers.base import BoxChange, BoxState, Capability, Enforcement, Snapshot, Volume
from skerry.providers.mock.agent import uid_of
from skerry.providers.mock.clock import Clock
from skerry.providers.mock.files import size_of
from skerry.providers.mock.host import Box, Faults, Host
from skerry.providers.mock.process import Context, Program

_BOOT_DEADLINE_S = 30.0
Matcher = str | Callable[[str], bool] | None


class Replies(list[tuple[Matcher, str | bytes, str | bytes, int, float]]):
    """An interpreter that knows some programs by heart; the first answer that fits is given."""

    async def __call__(self, context: Context) -> int:
        option, code, *_ = [*context.argv[1:], "", ""]
        if option not in ("-c", "-e"):
            data = context.read_file(option) if option else await context.stdin.read_all()
            code = data.decode(errors="replace")
        for wanted, stdout, stderr, exit_code, takes_s in self:
            if wanted is None or (wanted.strip() == code.strip() if isinstance(wanted, str) else wanted(code)):
                await context.sleep(takes_s)
                await context.stdout.write(stdout)
                await context.stderr.write(stderr)
                return exit_code
        name = context.argv[0]
        await context.print(f"mock: no reply is registered with `reply` for this {name} code:\n{code}", err=True)
        return 1


@functools.cache
def _host_of_this_process() -> Host:
    return Host()


class Mock(base.Provider):
    """A provider that isolates nothing: each box is a folder and some coroutines, served by the real agent.

    Test your own agent with it. Commands are yours to define, and time is virtual:

        @mock.program("pytest")
        async def pytest(ctx):
            await ctx.sleep(30)
            await ctx.print("2 passed")

        mock.reply("python", "print(6 * 7)", stdout="42\\n")

    All images are the same; memory is what programs say that they use (`ctx.use_memory`); disk and pids are counted
    and held; `host.images["name"] = "another id"` makes the boxes of an image outdated. Each `Mock()` has a host of its
    own; those that are loaded by name share one, so that a sandbox is found again by its id within the same program.
    """

    name = "mock"
    isolation = base.Isolation.NONE
    capabilities = frozenset(Capability[name] for name in ("STOP", "PAUSE", "SNAPSHOT", "WATCH", "VOLUMES", "LOGS"))
    honours = base.OPTIONAL_FIELDS - {"root", "sleep_after_s"}

    def __init__(
        self, config: base.ProviderConfig | None = None, *, host: Host | None = None, clock: Clock | None = None
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
        self, language: str, code: Matcher = None, *, stdout: str | bytes = "", stderr: str | bytes = "",
        exit_code: int = 0, takes_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Answer code of a language: this very text, what a function of the text accepts, or (None) any.

        It holds for `run_code`, and for the interpreter called with `-c`, a file, or the code as standard input.
        """
        language = ALIASES.get(language, language)
        if language not in LANGUAGES:
            raise errors.InvalidSpec(f"no language is called {language!r}; there are: {', '.join(sorted(LANGUAGES))}")
        names = [command[0] for command in LANGUAGES[language][1]]
        replies = self.host.programs.get(names[0])
        if not isinstance(replies, Replies):
            replies = Replies()
            self.host.programs |= dict.fromkeys(names, replies)
        replies.append((code, stdout, stderr, exit_code, takes_s))

    async def check(self) -> None:
        return None

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        if spec.mounts:
            raise errors.Unsupported("mounts", self.name, "its files are in memory and the host's are out of reach")
        if spec.network not in (Network.NONE, Network.HOST):
            raise errors.Unsupported("network", self.name, "there is no network to join, nor a gate; use none or host")
        if spec.command == IMAGE_COMMAND:
            raise errors.Unsupported("command", self.name, "its images have no command; give one of your own")
        if spec.ports:
            reason = "its boxes are in the memory of this program, where no other reaches them; use `expose`"
            raise errors.Unsupported("ports", self.name, reason)
        try:
            uid_of(spec.user)
        except Failure as failure:
            raise errors.UserNotFound(str(failure)) from None
        return dict.fromkeys(("memory", "cpus", "pids", "disk"), Enforcement(by="simulation"))

    async def create(self, id: SandboxId, spec: Spec) -> None:
        if id in self.host.boxes:
            raise errors.Conflict(f"the mock host has a box {id} already")
        box = Box(self.host, id, spec, None if spec.snapshot is None else self._folder_of(spec.snapshot))
        self._mount_volumes(box)
        self.host.boxes[id] = box
        self.host.notify(id)
        if self.host.next_creates:
            self.host.next_creates.pop(0)(box)
        if box.boot_s:
            await self.clock.sleep(min(box.boot_s, _BOOT_DEADLINE_S))
        if box.boot_s >= _BOOT_DEADLINE_S:
            told = f"the agent of box {id} did not answer within {_BOOT_DEADLINE_S:g} s"
            raise errors.CreateFailed(told, log="mock: booting\n")
        if self.host.boxes.get(id) is not box:
            raise errors.CreateFailed(f"box {id} was destroyed while it booted")
        box.boot()

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        box = self.host.boxes.pop(id, None)
        if box is not None:
            await box.stop(BoxState.DEAD)
            shutil.rmtree(box.folder, ignore_errors=True)
        for name in [name for name, (volume, _) in self.host.volumes.items() if volumes and volume.sandbox == id]:
            shutil.rmtree(self.host.volumes.pop(name)[1])

    async def discover(self) -> Mapping[SandboxId, base.BoxStatus]:
        return {id: box.status() for id, box in self.host.boxes.items()}

    async def dial(self, id: SandboxId) -> Stream:
        return self.host.box(id).dial()

    async def pause(self, id: SandboxId) -> None:
        """Freeze the box: its processes, its agent, and time as it sees it."""
        self.host.box(id).running().box_loop.pause()
        self.host.box(id).enter(BoxState.PAUSED)

    async def resume(self, id: SandboxId) -> None:
        self.host.box(id).running().box_loop.resume()
        self.host.box(id).enter(BoxState.RUNNING)

    async def stop(self, id: SandboxId) -> None:
        """End every process; the files stay."""
        await self.host.box(id).stop()

    async def start(self, id: SandboxId, spec: Spec | None = None) -> None:
        """Without a spec, as by somebody's hand: it has what it was made with."""
        box = self.host.box(id)
        if box.state is BoxState.PAUSED:
            raise errors.WrongState(f"box {id} is paused: resume it")
        if box.state is not BoxState.RUNNING:
            box.spec = spec or box.spec
            box.boot()

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        """Keep the box's files as they are now. Processes and volumes are not part of it."""
        box = self.host.box(id)
        if name in self.host.snapshots:
            raise errors.Conflict(f"the mock host has a snapshot {name!r} already")
        folder = self.host.new_folder("snapshot")
        shutil.copytree(box.folder, folder, symlinks=True, ignore=box.files.mounted, dirs_exist_ok=True)
        taken = Snapshot(name=name, id=f"{name}:1", sandbox=id, size=size_of(box.files.root), created_at=self.clock.now)
        self.host.snapshots[name] = (taken, folder)
        return taken

    async def snapshots(self) -> Sequence[Snapshot]:
        return [snapshot for snapshot, _ in self.host.snapshots.values()]

    async def remove_snapshot(self, name: str) -> None:
        folder = self._folder_of(name)
        if any(box.spec.snapshot == name for box in self.host.boxes.values()):
            raise errors.Conflict(f"the snapshot {name!r} is used by a box")
        del self.host.snapshots[name]
        shutil.rmtree(folder)

    def _folder_of(self, snapshot: str) -> str:
        if snapshot not in self.host.snapshots:
            raise errors.NotFound(f"the mock host has no snapshot {snapshot!r}")
        return self.host.snapshots[snapshot][1]

    @contextmanager
    def _changes(self) -> Iterator[asyncio.Queue[BoxChange | None]]:
        changes: asyncio.Queue[BoxChange | None] = asyncio.Queue()
        self.host.watchers.add(changes)
        try:
            yield changes
        finally:
            self.host.watchers.discard(changes)

    async def watch(self) -> AsyncIterator[BoxChange]:
        with self._changes() as changes:
            for id, box in self.host.boxes.items():
                changes.put_nowait(BoxChange(id=id, status=box.status()))
            while (change := await changes.get()) is not None:
                yield change
        raise errors.ProviderUnavailable(self.name, "the mock was told to end the watch", fix="watch again")

    def _mount_volumes(self, box: Box) -> None:
        """Put a box's volumes into its files, made where they are not there yet."""
        spec, instance = box.spec, box.spec.labels.get("skerry.instance", "")
        kind = caches.kind(spec)
        cache = Volume(name="", kind=kind, project=spec.project, instance=instance, created_at=self.clock.now)
        wanted = [
            (path, replace(cache, name=f"{kind}-{instance}-{spec.project}-{label}", label=label))
            for label, path in caches.mounts(spec)
        ]
        if spec.data is not False:
            name = f"data-{box.id}" if spec.name is None else f"data-{instance}-{spec.project}-{spec.name}"
            wanted.append(("/.data", replace(cache, name=name, kind="data", sandbox=box.id, label=spec.name or "")))
        for path, volume in wanted:
            known = self.host.volumes.get(volume.name)
            folder = self.host.new_folder("volume") if known is None else known[1]
            self.host.volumes[volume.name] = (volume, folder)
            box.files.mount(path, folder, read_only=volume.kind == "cache" and spec.cache is Cache.READ)

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return [
            replace(volume, size=size_of(folder) if sizes else None, in_use=self._is_used(volume))
            for volume, folder in self.host.volumes.values()
        ]

    async def remove_volume(self, name: str) -> None:
        if name not in self.host.volumes:
            raise errors.NotFound(f"the mock host has no volume {name!r}")
        if self._is_used(self.host.volumes[name][0]):
            raise errors.Conflict(f"the volume {name!r} is used by a box")
        shutil.rmtree(self.host.volumes.pop(name)[1])

    def _is_used(self, volume: Volume) -> bool:
        if volume.kind == "data":
            return volume.sandbox in self.host.boxes
        specs = [box.spec for box in self.host.boxes.values() if box.spec.project == volume.project]
        return any(
            (volume.kind, volume.label) == (caches.kind(spec), label)
            for spec in specs
            for label, _ in caches.mounts(spec)
        )

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        box = self.host.box(id)
        lines, told = box.log.splitlines(keepends=True), len(box.log)
        yield b"".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])
        with self._changes() as changes:
            while follow and box.state in (BoxState.RUNNING, BoxState.PAUSED):
                await changes.get()
                yield box.log[told:]
                told = len(box.log)
