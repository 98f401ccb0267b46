"""Boxes as bubblewrap processes: no daemon, no image, no root needed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from skerry import aio
from skerry.errors import AgentError, ConfigError, InvalidSpec, NotFound, ProviderError, Unsupported
from skerry.host import cgroup, disks, processes, scope
from skerry.host.processes import Process
from skerry.model.spec import Network, SandboxId, Spec
from skerry.net import dial
from skerry.net.stream import Stream
from skerry.providers.base import (
    BoxChange,
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    Isolation,
    Provider,
    ProviderConfig,
)
from skerry.providers.local import boxes, profile
from skerry.providers.local.boxes import Box, Meta, all_boxes
from skerry.providers.local.creation import NPROC, Creation, Defaults, counts_processes, group_name, processes_of
from skerry.providers.local.host import Host
from skerry.providers.local.zygote import Zygotes
from skerry.providers.shared import loopback, polling
from skerry.providers.shared.dialer import FirstStreams
from skerry.providers.shared.limits import CONTROLLERS, NO_LIMIT
from skerry.units import format_size, parse_size

_log = logging.getLogger("skerry.providers")

T = TypeVar("T")

_KILL_TIMEOUT_S = 10.0
_REMOVE_TIMEOUT_S = 5.0
_KEPT_S = 1.0
"""How long the stream of a create is kept for the first command: who makes hundreds of boxes has not as many open."""


class LocalConfig(ProviderConfig, frozen=True):
    state_dir: str = ""
    """One folder for each box; empty: /var/lib/skerry/local for root, else ~/.local/state/skerry/local."""
    cache_dir: str = ""
    """What boxes share; empty: /var/cache/skerry for root, else ~/.cache/skerry."""
    memory: int | str = "1G"
    pids: int = 256
    cpus: float | None = None
    disk: int | str = "512M"
    """The work folder, in memory unless a spec asks for a disk."""
    tmp: int | str = "256M"
    shm: int | str = "64M"
    start_timeout_s: float = 30.0
    zygote: Literal["auto", "off"] = "auto"
    """Whether boxes may be forked from a process that has the agent in its memory already."""

    def defaults(self) -> Defaults:
        try:
            sizes = {field: parse_size(getattr(self, field), field) for field in ("memory", "disk", "tmp", "shm")}
        except InvalidSpec as error:
            raise ConfigError(f"providers.local.{error}") from None
        return Defaults(**sizes, pids=self.pids, cpus=self.cpus, start_timeout_s=self.start_timeout_s)


class Local(Provider):
    name = "local"
    isolation = Isolation.NAMESPACE
    takes_memory_here = True
    capabilities = frozenset({Capability.WATCH})
    honours = frozenset({"root"})
    Config = LocalConfig

    def __init__(self, config: LocalConfig | None = None) -> None:
        config = config or LocalConfig()
        self._defaults = config.defaults()
        self._state_dir = _folder(config.state_dir, "/var/lib/skerry/local", "~/.local/state/skerry/local")
        self._host = Host(_folder(config.cache_dir, "/var/cache/skerry", "~/.cache/skerry"))
        # Own threads: a host that hangs must not take the program's other threads with it.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="skerry-local")
        self._first = FirstStreams()
        self._children: set[int] = set()
        self._children_lock = threading.Lock()
        self._knows_host = False
        zygotes = Zygotes(self._host, self._host.cache / "zygotes", self._remember_child)
        self._zygotes = zygotes if config.zygote == "auto" else None

    async def check(self) -> None:
        await self._in_thread(self._host.check)

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        _refuse_what_is_never_honoured(spec)
        if self._knows_host:  # it takes no time any more, and a thread would
            return self._enforcement(spec)
        enforced = await self._in_thread(lambda: self._enforcement(spec))
        self._knows_host = True
        return enforced

    async def describe(self) -> Mapping[str, Enforcement]:
        return {**await super().describe(), "rules": await self._in_thread(self._rules)}

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        _refuse_what_is_never_honoured(spec)
        self._reap()
        box = Box(self._state_dir, id)
        box.make()  # at once: a destroy that comes after a cancelled create must find it
        creation = Creation(self._host, self._defaults, box, spec, self._remember_child, self._zygotes)
        try:
            with creation.failures():
                await aio.run_to_end(self._in_thread(creation.start))
                try:
                    held = await self._greet(creation, box, spec)
                except AgentError:
                    if not creation.can_start_anew():
                        raise
                    await aio.run_to_end(self._in_thread(creation.start_anew))
                    held = await self._greet(creation, box, spec)
        finally:
            creation.close()
        asyncio.get_running_loop().call_later(_KEPT_S, self._first.forget, id)
        unlimited = {} if self._defaults.of(spec).cpus is not None else {"cpus": NO_LIMIT}
        return unlimited | {field: Enforcement(by=held[name]) for field, name in CONTROLLERS.items() if name in held}

    async def _greet(self, creation: Creation, box: Box, spec: Spec) -> dict[str, str]:
        """Wait for the agent's first answer, with which the box is whole; how the kernel holds each of its limits."""
        stream = await dial.unix(box.socket_path, timeout_s=creation.left_s)
        patience_s = creation.left_s / 2 if creation.can_start_anew() else creation.left_s
        async with self._first.first_client(box.id, stream, patience_s) as client:
            if spec.root is not None:  # what it has in place of our own files is not known before
                await loopback.check(client, spec)
            return creation.finish()

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._first.forget(id)
        await self._in_thread(lambda: self._destroy(id))
        self._reap()

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        self._reap()
        return await self._in_thread(lambda: {box.id: _status(box) for box in all_boxes(self._state_dir)})

    async def dial(self, id: SandboxId) -> Stream:
        box = Box(self._state_dir, id)
        if (first := self._first.take(id)) is not None:
            if box.is_running():
                return first
            first.close()
        if not box.path.is_dir():
            raise NotFound(f"there is no box {id}")
        return await dial.unix(box.socket_path)

    def watch(self) -> AsyncIterator[BoxChange]:
        return polling.watch(self.discover)

    def memory_of(self, spec: Spec) -> int:
        return self._defaults.of(spec).memory

    def holds(self, spec: Spec) -> int | None:
        return self._defaults.of(spec).written

    def runs_nothing(self, id: SandboxId) -> bool:
        box = Box(self._state_dir, id)
        first = next(iter(box.read_processes()), None)  # its agent, from which all of it descends
        try:
            return first is not None and first.is_alive() and not processes.children(first.pid)
        except OSError:
            return False  # this kernel does not tell, or it has just ended

    async def aclose(self) -> None:
        self._first.close()
        self._reap()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Once begun it runs to its end, cancelled or not: the box's lock makes whoever comes next wait for that."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _destroy(self, id: SandboxId) -> None:
        box = Box(self._state_dir, id)
        with box.locked(self._defaults.start_timeout_s + _KILL_TIMEOUT_S) as exists:
            if not exists:
                return
            meta = box.read_meta()
            if meta is None:
                _log.info("box %s is destroyed without its notes, by what the host knows of it", id)
                parents = set(scope.holder().hierarchies.parents.values())
                groups = [parent.path / group_name(id) for parent in parents]
            else:
                groups = [Path(group) for group in meta.groups]
            _kill(box, meta, groups)
            cgroup.remove(groups, _REMOVE_TIMEOUT_S)
            boxes.detach_all(box, _REMOVE_TIMEOUT_S)
            box.remove()

    def _enforcement(self, spec: Spec) -> dict[str, Enforcement]:
        holder = scope.holder()
        entries = {
            field: Enforcement(by=holder.how(controller), why_not=holder.why_not(controller))
            for field, controller in CONTROLLERS.items()
        }
        if not entries["pids"].by and counts_processes():
            entries["pids"] = Enforcement(by=NPROC)
        shared = "only root can give each box a host uid of its own: boxes share yours"
        own = Enforcement(by="a host uid of its own for each box")
        return {
            **entries,
            "disk": Enforcement(by=self._disk(spec)),
            "tmp": Enforcement(by=f"a tmpfs of {format_size(self._defaults.tmp)}"),
            "network": self._rules() if spec.network is Network.RULES else Enforcement(by=_NETWORKS[spec.network]),
            "seccomp": Enforcement(by=f"a filter of {len(self._host.seccomp_program) // 8} instructions"),
            **dict.fromkeys(("lifetime_s", "idle_s"), Enforcement(by="the agent in the box")),
            "uid": own if self._host.has_own_uids else Enforcement(why_not=shared),
        }

    def _disk(self, spec: Spec) -> str:
        if spec.disk is None:
            return f"a tmpfs of {format_size(self._defaults.disk)}"
        return "an ext4 image on a loop device" if disks.why_none() is None else "a tmpfs of that size, in memory"

    def _rules(self) -> Enforcement:
        why_not = self._host.why_no_rules()
        return Enforcement(by=loopback.BY_RULES) if why_not is None else Enforcement(why_not=why_not)

    def _remember_child(self, pid: int) -> None:
        with self._children_lock:
            self._children.add(pid)

    def _reap(self) -> None:
        """Boxes outlive us, so nobody waits for them: those that have ended are collected on the way."""
        with self._children_lock:
            for pid in [*self._children]:
                try:
                    ended, _ = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    ended = pid
                if ended:
                    self._children.discard(pid)


_NETWORKS: dict[str, str] = {
    Network.NONE: "a network namespace of its own, with loopback only",
    Network.HOST: "nothing: it shares the host's network, as was asked",
    Network.RULES: loopback.BY_RULES,
}


def _refuse_what_is_never_honoured(spec: Spec) -> None:
    if spec.network not in _NETWORKS:
        raise Unsupported("network", "local", f"it has no {spec.network} network; there are none, rules and host")
    profile.user_of(spec)


def _kill(box: Box, meta: Meta | None, groups: list[Path]) -> None:
    """Kill all of it: what was starting may have forked while we looked, so we look until nothing is left."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    dead: set[Process] = set()
    while found := processes_of(box, meta, groups, dead):
        if not processes.wait_until_dead(found, deadline - time.monotonic(), kill=True):
            raise ProviderError(f"box {box.id} does not die: one of its processes hangs in the kernel; try again")
        dead |= found


def _status(box: Box) -> BoxStatus:
    meta, running = box.read_meta(), box.is_running()
    state = BoxState.RUNNING if running else BoxState.DEAD if box.is_whole() else BoxState.REMAINS
    return BoxStatus(
        state=state,
        created_at=meta.created_at if meta else None,
        labels=meta.labels if meta else {},
        out_of_memory=meta is not None and not running and cgroup.ran_out_of_memory(map(Path, meta.groups)),
    )


def _folder(setting: str, for_root: str, for_user: str) -> Path:
    return Path(os.path.expanduser(setting or (for_root if os.geteuid() == 0 else for_user))).absolute()
