"""Boxes as bubblewrap processes: no daemon, no image, no root needed."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from skerry.agent import dial
from skerry.agent.stream import Stream
from skerry.errors import ConfigError, InvalidSpec, NotFound, ProviderError, Unsupported
from skerry.host import cgroup, processes
from skerry.providers import disks
from skerry.providers.base import BoxState, BoxStatus, Enforcement, Isolation, Provider, ProviderConfig
from skerry.providers.local import mounts, profile
from skerry.providers.local.boxes import Box, Meta, all_boxes
from skerry.providers.local.creation import Creation, Defaults, group_name, processes_of
from skerry.providers.local.host import Host
from skerry.spec import Network, SandboxId, Spec
from skerry.units import format_size, parse_size

T = TypeVar("T")

_WORKERS = 32
_KILL_TIMEOUT_S = 10.0
_REMOVE_TIMEOUT_S = 5.0


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

    def defaults(self) -> Defaults:
        try:
            sizes = {field: parse_size(getattr(self, field), field) for field in ("memory", "disk", "tmp", "shm")}
        except InvalidSpec as error:
            raise ConfigError(f"providers.local.{error}") from None
        return Defaults(**sizes, pids=self.pids, cpus=self.cpus, start_timeout_s=self.start_timeout_s)


class Local(Provider):
    name = "local"
    isolation = Isolation.NAMESPACE
    honours = frozenset({"root"})
    Config = LocalConfig

    def __init__(self, config: LocalConfig | None = None) -> None:
        config = config or LocalConfig()
        self._defaults = config.defaults()
        self._state_dir = _folder(config.state_dir, "/var/lib/skerry/local", "~/.local/state/skerry/local")
        self._host = Host(_folder(config.cache_dir, "/var/cache/skerry", "~/.cache/skerry"))
        # Own threads: a host that hangs must not take the program's other threads with it.
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="skerry-local")
        self._children: set[int] = set()
        self._children_lock = threading.Lock()

    async def check(self) -> None:
        await self._in_thread(self._host.check)

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        _refuse_what_is_never_honoured(spec)
        return await self._in_thread(lambda: self._enforcement(spec))

    async def create(self, id: SandboxId, spec: Spec) -> None:
        _refuse_what_is_never_honoured(spec)
        self._reap()
        box = Box(self._state_dir, id)
        box.make()  # at once: a destroy that comes after a cancelled create must find it
        await self._in_thread(lambda: self._fill(box, spec))

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        await self._in_thread(lambda: self._destroy(id))
        self._reap()

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        self._reap()
        return await self._in_thread(lambda: {box.id: _status(box) for box in all_boxes(self._state_dir)})

    async def dial(self, id: SandboxId) -> Stream:
        box = Box(self._state_dir, id)
        if not box.path.is_dir():
            raise NotFound(f"there is no box {id}")
        return await dial.unix(box.socket_path)

    async def aclose(self) -> None:
        self._reap()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Once begun it runs to its end, cancelled or not: the box's lock makes whoever comes next wait for that."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _fill(self, box: Box, spec: Spec) -> None:
        Creation(self._host, self._defaults, box, spec, self._remember_child).run()

    def _destroy(self, id: SandboxId) -> None:
        box = Box(self._state_dir, id)
        with box.locked(self._defaults.start_timeout_s + _KILL_TIMEOUT_S) as exists:
            if not exists:
                return
            meta = box.read_meta()
            groups = [Path(group) for group in meta.groups] if meta else self._all_groups(id)
            _kill(box, meta, groups)
            cgroup.remove(groups, _REMOVE_TIMEOUT_S)
            mounts.detach_all(box, _REMOVE_TIMEOUT_S)
            box.remove()

    def _all_groups(self, id: SandboxId) -> list[Path]:
        return [parent.path / group_name(id) for parent in set(self._host.hierarchies.parents.values())]

    def _enforcement(self, spec: Spec) -> dict[str, Enforcement]:
        entries = {field: self._by_group(controller) for field, controller in _CONTROLLERS.items()}
        if not entries["pids"].by and _kernel() >= _NPROC_PER_NAMESPACE:
            entries["pids"] = Enforcement(by="RLIMIT_NPROC in the box's own user namespace")
        entries["disk"] = _disk_enforcement(spec, self._defaults.disk)
        entries["tmp"] = Enforcement(by=f"a tmpfs of {format_size(self._defaults.tmp)}")
        entries["network"] = Enforcement(by=_NETWORKS[spec.network])
        entries["seccomp"] = Enforcement(by=f"a filter of {len(self._host.seccomp_program) // 8} instructions")
        entries["lifetime_s"] = entries["idle_s"] = Enforcement(by="the agent in the box")
        if self._host.has_own_uids:
            entries["uid"] = Enforcement(by="a host uid of its own for each box")
        else:
            entries["uid"] = Enforcement(why_not="only root can give each box a host uid of its own: boxes share yours")
        return entries

    def _by_group(self, controller: str) -> Enforcement:
        hierarchies = self._host.hierarchies
        if controller in hierarchies.parents:
            parent = hierarchies.parents[controller]
            return Enforcement(by=f"cgroup v{parent.version} in {parent.path}")
        if controller in self._host.scope_controllers:
            return Enforcement(by="a scope of your systemd user manager")
        return Enforcement(why_not=hierarchies.why_not[controller])

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


_NPROC_PER_NAMESPACE = (5, 14)
"""From this kernel on the count is the box's own; before, it was that of all the user's processes."""
_CONTROLLERS = {"memory": "memory", "cpus": "cpu", "pids": "pids"}
_NETWORKS = {
    Network.NONE: "a network namespace of its own, with loopback only",
    Network.HOST: "nothing: it shares the host's network, as was asked",
}


def _refuse_what_is_never_honoured(spec: Spec) -> None:
    if spec.network not in _NETWORKS:
        raise Unsupported("network", "local", f"it has no {spec.network} network; there are none and host")
    profile.user_of(spec)


def _kill(box: Box, meta: Meta | None, groups: list[Path]) -> None:
    """All of it: what was starting may have forked while we looked, so we look until nothing is left."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while found := processes_of(box, meta, groups):
        if not processes.kill_and_wait(found, deadline - time.monotonic()):
            raise ProviderError(f"box {box.id} does not die: one of its processes hangs in the kernel; try again")


def _disk_enforcement(spec: Spec, default: int) -> Enforcement:
    if spec.disk is None:
        return Enforcement(by=f"a tmpfs of {format_size(default)}")
    if disks.why_none() is None:
        return Enforcement(by="an ext4 image on a loop device")
    return Enforcement(by="a tmpfs of that size, in memory")


def _status(box: Box) -> BoxStatus:
    meta, running = box.read_meta(), box.is_running()
    return BoxStatus(
        state=BoxState.RUNNING if running else BoxState.DEAD,
        created_at=meta.created_at if meta else None,
        labels=meta.labels if meta else {},
        out_of_memory=meta is not None and not running and cgroup.ran_out_of_memory(map(Path, meta.groups)),
    )


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _folder(setting: str, for_root: str, for_user: str) -> Path:
    return Path(os.path.expanduser(setting or (for_root if os.geteuid() == 0 else for_user))).absolute()
