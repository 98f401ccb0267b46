"""What a mock provider works on: the boxes, programs and time of one imaginary host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from skerry.errors import AgentUnreachable, NotFound, WrongState
from skerry.providers.base import BoxChange, BoxState, BoxStatus, Snapshot
from skerry.providers.mock import file_programs, programs, text_programs
from skerry.providers.mock.agent import HOME, Agent, uid_of
from skerry.providers.mock.clock import Clock
from skerry.providers.mock.filesystem import FileSystem
from skerry.providers.mock.handles import DEVICES
from skerry.providers.mock.kernel import PROGRAM_MARK, Machine, Program
from skerry.providers.mock.stream import MemoryStream
from skerry.providers.mock.volumes import Volumes
from skerry.spec import SandboxId, Spec


class Box:
    """One box: its files outlive its machine, as a disk outlives a boot."""

    def __init__(self, host: Host, id: SandboxId, spec: Spec, files: FileSystem | None = None) -> None:
        self.host = host
        self.id = id
        self.spec = spec
        self.files = files or new_files(host, spec)
        host.volumes.mount(self.files, id, spec, uid_of(spec.user), host.clock.now)
        self.created_at = host.clock.now
        self.image = host.image_id(spec)
        self.log = bytearray()
        """What the box itself said."""
        self._state = BoxState.DEAD
        self.machine: Machine | None = None
        self.agent: Agent | None = None
        self.hangs = False
        self.garbage = False
        self.boot_s = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def state(self) -> BoxState:
        return self._state

    @state.setter
    def state(self, state: BoxState) -> None:
        self._state = state
        self.log += f"mock: {state}\n".encode()
        self.host.tell(self.id)

    def status(self) -> BoxStatus:
        return BoxStatus(
            state=self.state,
            created_at=self.created_at,
            labels=dict(self.spec.labels),
            image=self.image,
            outdated=self.image != self.host.image_id(self.spec),
        )

    def boot(self) -> None:
        host, spec = self.host, self.spec
        machine = Machine(host.clock, self.files, host.programs, max_pids=spec.pids, memory=spec.memory)
        self.machine = machine
        self.loop = asyncio.get_running_loop()
        self.agent = Agent(machine, spec, self.halt)
        self.state = BoxState.RUNNING

    def do(self, action: Callable[[Box], None]) -> None:
        """Act on the box from anywhere: in the loop that it lives in, which the sync interface has in a thread."""
        loop = self.loop
        if loop is None or not loop.is_running() or _is_running_here(loop):
            action(self)
            return

        async def act() -> None:
            action(self)

        asyncio.run_coroutine_threadsafe(act(), loop).result(timeout=10)

    def halt(self, state: BoxState = BoxState.DEAD) -> None:
        """Switch off: every process dies, every stream ends, the files stay."""
        machine, agent = self.machine, self.agent
        self.machine = self.agent = None
        self.state = state
        if machine is not None:
            machine.halt()
        if agent is not None:
            for channel in list(agent.channels):
                channel.close()

    async def stop(self, state: BoxState = BoxState.STOPPED) -> None:
        machine = self.machine
        tasks = machine.tasks() if machine is not None else []
        self.halt(state)
        if tasks:
            await asyncio.wait(tasks, timeout=5)

    def dial(self) -> MemoryStream:
        if self.agent is None:
            raise AgentUnreachable(f"box {self.id} is {self.state}: nothing runs in it")
        near, far = MemoryStream.pair(self.host.clock.traffic)
        self.agent.serve(far, garbage=self.garbage, hangs=self.hangs)
        return near

    def pause(self) -> None:
        machine, agent = self._running()
        machine.pause()
        self.state = BoxState.PAUSED
        for channel in agent.channels:
            channel.freeze()

    def resume(self) -> None:
        machine, agent = self._running()
        machine.resume()
        self.state = BoxState.RUNNING
        for channel in list(agent.channels):
            channel.thaw()

    def _running(self) -> tuple[Machine, Agent]:
        if self.machine is None or self.agent is None:
            raise WrongState(f"box {self.id} is {self.state}")
        return self.machine, self.agent


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class Host:
    """An imaginary host. Give one `Host` to two `Mock` objects, and each finds the boxes of the other:
    so a test restarts a manager while its boxes live on.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.boxes: dict[SandboxId, Box] = {}
        self.programs: dict[str, Program] = {**programs.program, **file_programs.program, **text_programs.program}
        self.snapshots: dict[str, tuple[Snapshot, FileSystem]] = {}
        self.volumes = Volumes()
        self.images: dict[str, str] = {}
        """The id that the name of an image means by now, if it is another than at first: a test moves it."""
        self.watchers: set[asyncio.Queue[BoxChange | None]] = set()
        """Told of every change of a box; None is the end of the provider's answers."""
        self.next_creates: list[Callable[[Box], None]] = []
        """Faults, one for each create to come."""

    def image_id(self, spec: Spec) -> str:
        name = spec.snapshot or spec.image or "none"
        return self.images.get(name, f"{name}:1")

    def tell(self, id: SandboxId) -> None:
        """Tell all who watch how a box is now."""
        box = self.boxes.get(id)
        for watcher in self.watchers:
            watcher.put_nowait(BoxChange(id=id, status=box.status() if box is not None else None))

    def box(self, id: SandboxId) -> Box:
        if id not in self.boxes:
            raise NotFound(f"the mock host has no box {id}")
        return self.boxes[id]


def new_files(host: Host, spec: Spec) -> FileSystem:
    """The files of a fresh box. What the system itself takes does not count against `disk`."""
    files = FileSystem(lambda: host.clock.now)
    uid = uid_of(spec.user)
    for path in ("/usr/bin", "/etc", "/home", "/dev"):
        files.make_dir(path.encode(), parents=True)
    files.make_dir(HOME.encode())
    files.chown(HOME.encode(), uid, uid)
    files.make_dir(b"/tmp", mode=0o1777)
    files.symlink(b"/bin", b"usr/bin")
    for device in [*DEVICES, b"stdin", b"stdout", b"stderr", b"tty"]:
        files.device(b"/dev/" + device, device)
    files.replace(b"/etc/passwd", f"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::{HOME}:/bin/sh\n".encode())
    files.replace(b"/etc/hostname", b"skerry\n")
    for name in host.programs:
        files.replace(b"/usr/bin/" + os.fsencode(name), PROGRAM_MARK + name.encode(), mode=0o755)
    if spec.cwd is not None and not files.exists(os.fsencode(spec.cwd)):
        files.make_dir(os.fsencode(spec.cwd), parents=True)
        files.chown(os.fsencode(spec.cwd), uid, uid)
    files.used = 0
    files.capacity = spec.disk or files.capacity
    return files
