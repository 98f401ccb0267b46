"""Limits for a plain user through systemd: each box in a scope of the user's own manager, where it may delegate."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from skerry.errors import ProviderError
from skerry.host.cgroup import CONTROLLERS, Limits

_PROBE_TIMEOUT_S = 10


def usable_controllers(uid: int, cgroup_root: Path = Path("/sys/fs/cgroup")) -> set[str]:
    """The controllers that a scope of this user gets, tried by starting one; none without a user manager."""
    service = cgroup_root / f"user.slice/user-{uid}.slice/user@{uid}.service"
    try:
        delegated = set((service / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    except OSError:
        return set()
    if not delegated or shutil.which("systemd-run") is None:
        return set()
    try:
        tried = subprocess.run(
            [*_systemd_run(), "--", "/bin/true"], env=environment(uid), capture_output=True, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return delegated if tried.returncode == 0 else set()


def command(name: str, limits: Limits) -> list[str]:
    """What to put before a command so that it runs in a scope of this name, with an empty environment."""
    properties = [f"MemoryMax={limits.memory}", "MemorySwapMax=0", f"TasksMax={limits.pids + 1}", "OOMPolicy=continue"]
    if limits.cpus is not None:
        properties.append(f"CPUQuota={limits.cpus * 100:g}%")
    options = [option for text in properties for option in ("-p", text)]
    return [*_systemd_run(), f"--unit={name}", *options, "--", shutil.which("env") or "/usr/bin/env", "-i"]


def environment(uid: int) -> dict[str, str]:
    """How systemd-run finds the user's manager; nothing else of ours goes there."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{uid}"}


def check_placed(name: str, pid: int, limits: Limits, cgroup_root: Path = Path("/sys/fs/cgroup")) -> None:
    """Read back that the process is in the scope, and that the scope has the limits."""
    path = Path(f"/proc/{pid}/cgroup").read_text().rpartition("0::")[2].strip()
    held = cgroup_root / path.lstrip("/")
    wanted = {"memory.max": str(limits.memory), "pids.max": str(limits.pids + 1)}
    if os.path.basename(path) != f"{name}.scope":
        raise ProviderError(f"systemd did not put process {pid} into the scope {name}")
    for file, value in wanted.items():
        if (held / file).read_text().strip() != value:
            raise ProviderError(f"systemd did not set {file} of the scope {name}")


def _systemd_run() -> list[str]:
    program = shutil.which("systemd-run") or "systemd-run"
    return [program, "--user", "--scope", "--quiet", "--collect"]
