"""Holder of limits on this host: control groups that we make, or for a plain user scopes of its systemd manager."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.errors import ProviderError
from skerry.host import cgroup
from skerry.host.cgroup import CONTROLLERS, GroupLimits, Hierarchies

_log = logging.getLogger("skerry.host")

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_found: dict[int, Holder] = {}
_finding = threading.Lock()


class Holder(NamedTuple):
    """Holder of the limits of programs that this process starts."""

    hierarchies: Hierarchies
    by_scope: frozenset[str]
    """The controllers of a scope. If there are any, all is held by it: systemd alone changes its groups."""

    def how(self, controller: str) -> str:
        """Empty where nothing holds it."""
        if self.by_scope:
            return "a scope of your systemd user manager" if controller in self.by_scope else ""
        parent = self.hierarchies.parents.get(controller)
        return "" if parent is None else f"cgroup v{parent.version} in {parent.path}"

    def why_not(self, controller: str) -> str:
        """Empty where something holds it."""
        return "" if self.how(controller) else self.hierarchies.why_not[controller]

    def groups(self, name: str, limits: GroupLimits) -> list[Path]:
        """Groups that are ours to remove."""
        return [] if self.by_scope else self.hierarchies.groups(name, limits)

    def command(self, argv: list[str], name: str, limits: GroupLimits) -> tuple[list[str], dict[str, str]]:
        """The command that starts a program so that it can be confined, and the environment for that."""
        return ([*command(name, limits), *argv], _environment(os.geteuid())) if self.by_scope else (argv, {})

    def confine(self, pid: int, name: str, limits: GroupLimits) -> None:
        """Confine a process that was started by `command`. Raises ProviderError."""
        if not self.by_scope:
            self.hierarchies.confine(pid, name, limits)

    def check(self, pid: int, name: str, limits: GroupLimits) -> dict[str, str]:
        """Read back from the kernel how each limit of a process is held. Raises ProviderError if one is not."""
        if self.by_scope:
            _check_placed(name, pid, limits, self.by_scope)
        else:
            self.hierarchies.check(pid, name, limits)
        return {controller: how for controller in limits.controllers() if (how := self.how(controller))}


def holder() -> Holder:
    """Find the holder, once for all threads. Raises ProviderError if that cannot be told now, and concludes nothing."""
    uid = os.geteuid()
    with _finding:
        if uid not in _found:
            try:
                hierarchies = cgroup.find()
            except OSError as error:
                raise ProviderError(f"it cannot be told which limits this host can hold: {error}; try again") from error
            # Only asked for where groups cannot be made directly: systemd takes its time.
            scoped = usable_controllers(uid) if uid and hierarchies.why_not else set()
            _found[uid] = Holder(hierarchies, frozenset(scoped if scoped > set(hierarchies.parents) else ()))
        return _found[uid]


def _forget_the_lock() -> None:
    """Whoever held it in the parent is not there to let go of it in a child."""
    global _finding
    _finding = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_lock)


def usable_controllers(uid: int, cgroup_root: Path = _CGROUP_ROOT) -> set[str]:
    """The controllers that a scope of this user gets, tried by starting one; none without a user manager."""
    service = cgroup_root / f"user.slice/user-{uid}.slice/user@{uid}.service"
    try:
        delegated = set((service / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    except OSError:
        return set()
    if not delegated or shutil.which("systemd-run") is None:
        return set()
    probe = [*_systemd_run(), "--", "/bin/true"]
    try:
        subprocess.run(probe, env=_environment(uid), capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("systemd makes no scopes for user %d: %s", uid, error)
        return set()
    return delegated


def command(name: str, limits: GroupLimits) -> list[str]:
    """The beginning of a command that runs in a scope of this name, with an empty environment."""
    properties = [f"MemoryMax={limits.memory}", "MemorySwapMax=0", f"TasksMax={limits.pids + 1}", "OOMPolicy=continue"]
    if limits.cpus is not None:
        properties.append(f"CPUQuota={limits.cpus * 100:g}%")
    options = [option for text in properties for option in ("-p", text)]
    return [*_systemd_run(), f"--unit={name}", *options, "--", shutil.which("env") or "/usr/bin/env", "-i"]


def _environment(uid: int) -> dict[str, str]:
    """Environment by which systemd-run finds the user's manager; nothing else of ours goes there."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{uid}"}


def _check_placed(name: str, pid: int, limits: GroupLimits, controllers: frozenset[str]) -> None:
    """Read back that the process is in the scope, and that the scope has the limits."""
    path = Path(f"/proc/{pid}/cgroup").read_text().rpartition("0::")[2].strip()
    if os.path.basename(path) != f"{name}.scope":
        raise ProviderError(f"systemd did not put process {pid} into the scope {name}")
    given = msgspec.structs.replace(limits, pids=limits.pids + 1)
    for controller in controllers.intersection(limits.controllers()):
        if not given.are_held_by(_CGROUP_ROOT / path.lstrip("/"), controller, 2):
            raise ProviderError(f"systemd did not set the limit of {controller} of the scope {name}")


def _systemd_run() -> list[str]:
    return [shutil.which("systemd-run") or "systemd-run", "--user", "--scope", "--quiet", "--collect"]
