"""An imaginary host: its boxes, programs and time, and what can go wrong with them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable

from skerry.errors import AgentUnreachable, CreateFailed, NotFound, SkerryError, WrongState
from skerry.model.spec import SandboxId, Spec
from skerry.net.stream import FdStream
from skerry.providers.base import BoxChange, BoxState, BoxStatus, Snapshot, Volume
from skerry.providers.mock.agent import HOME, BoxAgent, uid_of
from skerry.providers.mock.clock import Clock
from skerry.providers.mock.files import ROOT, Files
from skerry.providers.mock.process import Program
from skerry.providers.mock.programs import PROGRAMS

_MEMORY = "/dev/shm"


class Box:
    """One box: its files outlive its agent, as a disk outlives a boot."""

    def __init__(self, host: Host, id: SandboxId, spec: Spec, snapshot: str | None) -> None:
        self.host, self.id, self.spec = host, id, spec
        self.folder = host.new_folder("box")
        if snapshot is not None:
            shutil.copytree(snapshot, self.folder, symlinks=True, dirs_exist_ok=True)
        self.files = Files(self.folder + ROOT, uid=uid_of(spec.user), capacity=spec.disk)
        for path in (HOME, spec.cwd or HOME, "/tmp", "/dev"):
            self.files.give(path)
        self.created_at = host.clock.now
        self.image = host.image_id(spec)
        self.log = b""
        """What the box itself said."""
        self.agent: BoxAgent | None = None
        self.hangs = self.speaks_garbage = False
        self.boot_s = 0.0
        self.state = BoxState.DEAD
        self._streams: list[FdStream] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, state: BoxState) -> None:
        self.state = state
        self.log += f"mock: {state}\n".encode()
        self.host.notify(self.id)

    def status(self) -> BoxStatus:
        is_outdated, labels = self.image != self.host.image_id(self.spec), dict(self.spec.labels)
        return BoxStatus(
            state=self.state, created_at=self.created_at, labels=labels, image=self.image, outdated=is_outdated
        )

    def boot(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.agent = BoxAgent(self)
        self.enter(BoxState.RUNNING)

    def do(self, action: Callable[[Box], object]) -> None:
        """Act on the box from anywhere: in the loop that it lives in, which the sync interface has in a thread."""

        async def act() -> None:
            action(self)

        if self._loop is None or not self._loop.is_running() or asyncio._get_running_loop() is self._loop:
            action(self)
        else:
            asyncio.run_coroutine_threadsafe(act(), self._loop).result(timeout=10)

    def halt(self, state: BoxState = BoxState.DEAD) -> list[asyncio.Task[int]]:
        """Switch off: every process dies (gives their tasks), every stream ends, the files stay."""
        agent, self.agent = self.agent, None
        self.enter(state)
        return [] if agent is None else agent.halt()

    async def stop(self, state: BoxState = BoxState.STOPPED) -> None:
        if tasks := self.halt(state):
            await asyncio.wait(tasks, timeout=5)

    def cut(self) -> None:
        """Break every stream, for both sides at once."""
        for stream in self._streams:
            stream.close()

    def die(self) -> None:
        self.halt()
        self.cut()

    def lose_agent(self) -> None:
        self.running().halt()
        self.agent = None
        self.cut()

    def dial(self) -> FdStream:
        if self.agent is None:
            raise AgentUnreachable(f"box {self.id} is {self.state}: nothing runs in it")
        fd = self.agent.dial()
        self._streams = [*(each for each in self._streams if each.is_open), FdStream(fd, fd)]
        return self._streams[-1]

    def running(self) -> BoxAgent:
        if self.agent is None:
            raise WrongState(f"box {self.id} is {self.state}")
        return self.agent


class Host:
    """An imaginary host. Give one `Host` to two `Mock` objects, and each finds the boxes of the other:
    so a test restarts a manager while its boxes live on.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.boxes: dict[SandboxId, Box] = {}
        self.programs: dict[str, Program] = dict(PROGRAMS)
        self.snapshots: dict[str, tuple[Snapshot, str]] = {}
        self.volumes: dict[str, tuple[Volume, str]] = {}
        self.images: dict[str, str] = {}
        """The id that the name of an image means by now, if it is another than at first: a test moves it."""
        self.watchers: set[asyncio.Queue[BoxChange | None]] = set()
        """Notified of every change of a box; None is the end of the provider's answers."""
        self.next_creates: list[Callable[[Box], object]] = []
        """Faults, one for each create to come."""
        self._folder = tempfile.mkdtemp(prefix="skerry-mock-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def new_folder(self, prefix: str) -> str:
        """A folder of its own, gone at the latest with this program."""
        return tempfile.mkdtemp(prefix=f"{prefix}-", dir=self._folder)

    def image_id(self, spec: Spec) -> str:
        name = spec.snapshot or spec.image or "none"
        return self.images.get(name, f"{name}:1")

    def notify(self, id: SandboxId) -> None:
        """Tell all who watch how a box is now."""
        box = self.boxes.get(id)
        for watcher in self.watchers:
            watcher.put_nowait(BoxChange(id=id, status=box.status() if box is not None else None))

    def box(self, id: SandboxId) -> Box:
        if id not in self.boxes:
            raise NotFound(f"the mock host has no box {id}")
        return self.boxes[id]


class Faults:
    """Breaks boxes for tests of whatever manages them.

    With an `id` a living box breaks now. Without, the fault waits for a create: each call is for one create, and
    `times` makes it several; the first fault given is the first to strike.

        mock.faults.fail_create(CreateFailed("no room"))
        mock.faults.slow_boot(90)                  # longer than the provider waits: the create fails
        mock.faults.lost_box(sandbox.id)           # the host forgets it
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def slow_boot(self, seconds: float, *, times: int = 1) -> None:
        """The next create takes so long, on the virtual clock."""
        self._strike(lambda box: setattr(box, "boot_s", seconds), None, times)

    def fail_create(self, error: SkerryError | None = None, *, times: int = 1) -> None:
        """The next create raises, and leaves half a box behind for the caller to destroy."""
        failure = error or CreateFailed("the mock was told to fail", log="mock: fail_create")

        def fail(box: Box) -> None:
            raise failure

        self._strike(fail, None, times)

    def dead_agent(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The box runs but its agent is gone: streams end, nothing can be dialled. A create waits, then fails."""
        if id is None:
            self.slow_boot(float("inf"), times=times)
        else:
            self._strike(Box.lose_agent, id, times)

    def hang(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The agent takes streams and answers nothing more."""
        self._strike(lambda box: setattr(box, "hangs", True), id, times)

    def garbage_frames(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """The agent greets and then answers with what is no frame."""
        self._strike(lambda box: setattr(box, "speaks_garbage", True), id, times)

    def full_disk(self, id: SandboxId | None = None, *, times: int = 1) -> None:
        """No byte more fits on the box's disk."""
        self._strike(lambda box: box.files.fill(), id, times)

    def lost_box(self, id: SandboxId) -> None:
        """The box is gone, as if another had removed it."""
        self.dead_box(id)
        del self._host.boxes[id]
        self._host.notify(id)

    def dead_box(self, id: SandboxId) -> None:
        """Everything in the box died; what is left of it can be found."""
        self._strike(Box.die, id, 1)

    def drop_stream(self, id: SandboxId) -> None:
        """Every stream to the box breaks once; it can be dialled again."""
        self._strike(Box.cut, id, 1)

    def end_watch(self) -> None:
        """Whoever watches the host hears no more of it, and has to begin again."""
        for watcher in self._host.watchers:
            watcher.put_nowait(None)

    def _strike(self, fault: Callable[[Box], object], id: SandboxId | None, times: int) -> None:
        if id is None:
            self._host.next_creates += [fault] * times
        else:
            self._host.box(id).do(fault)
