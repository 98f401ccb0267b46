"""What this host has for boxes, found once: tools, interpreter, root, and who can hold which limit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from skerry.agent import runtime
from skerry.errors import ProviderUnavailable
from skerry.host import cgroup, scope, uids
from skerry.providers.local import seccomp
from skerry.providers.local.skeleton import PYTHON, skeleton

_PROBE_TIMEOUT_S = 20
_OLDEST_PYTHON = 8
_SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile with 'userns,'",
    ),
}
"""Settings that forbid user namespaces: the value that does, and what to do about it."""


class Interpreter(NamedTuple):
    """How the agent is run in a box."""

    argv: list[str]
    agent: Path
    portable: Path | None
    """The folder to bind at PYTHON; None if the box's own interpreter is used."""


_TOOL_PATH = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin"


class Host:
    def __init__(self, cache: Path) -> None:
        self._cache = cache

    @cached_property
    def bwrap(self) -> str:
        return _tool("bwrap", "apt-get install bubblewrap (or your distribution's bubblewrap package)")

    @cached_property
    def seccomp_program(self) -> bytes:
        machine = os.uname().machine
        if machine not in seccomp.ARCHITECTURES:
            known = " and ".join(seccomp.ARCHITECTURES)
            raise ProviderUnavailable(
                "local", f"there is no system call filter for {machine}", fix=f"use a host with {known}"
            )
        return seccomp.program(machine)

    @cached_property
    def has_own_uids(self) -> bool:
        return uids.are_available()

    def as_uid(self, uid: int | None) -> list[str]:
        """What to put before bubblewrap so that it never runs as root."""
        if uid is None:
            return []
        # chroot to where we are, for its --userspec: it starts in half the time of setpriv
        chroot = _tool("chroot", "apt-get install coreutils")
        return [chroot, f"--userspec=+{uid}:+{uid}", "--groups=", "/"]

    @cached_property
    def hierarchies(self) -> cgroup.Hierarchies:
        return cgroup.find()

    @cached_property
    def scope_controllers(self) -> set[str]:
        """Only asked for where groups cannot be made directly: systemd takes its time."""
        return scope.usable_controllers(os.geteuid()) if self.hierarchies.why_not and os.geteuid() else set()

    @cached_property
    def own_interpreter(self) -> Interpreter:
        """For a box with the host's /usr: the interpreter there, or else the portable one."""
        python = _python_in_usr()
        if python is None:
            return self.portable_interpreter
        return Interpreter([python, "-I", "-S", "-B"], runtime.agent_folder(self._cache, python), None)

    @cached_property
    def portable_interpreter(self) -> Interpreter:
        """For any other root: what it has may be too old, or nothing."""
        portable = runtime.portable(self._cache)
        return Interpreter(portable.argv(PYTHON), runtime.agent_folder(self._cache, portable.python), portable.folder)

    @cached_property
    def skeleton(self) -> Path:
        return skeleton(self._cache, self.own_interpreter.agent)

    def check(self) -> None:
        """Raise ProviderUnavailable, with the fix, unless a bare box can be made here."""
        if os.uname().sysname != "Linux":
            raise ProviderUnavailable("local", "it needs Linux", fix="use a Linux host, or another provider")
        _ = self.seccomp_program
        command = [*self.as_uid(uids.take() if self.has_own_uids else None), self.bwrap]
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
        try:
            tried = subprocess.run(
                [*command, *options, "--", shutil.which("true") or "/bin/true"],
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProviderUnavailable("local", f"bubblewrap fails: {error}", fix="try to run bwrap by hand") from error
        if tried.returncode != 0:
            said = tried.stderr.decode(errors="replace").strip() or f"exit code {tried.returncode}"
            raise ProviderUnavailable("local", f"bubblewrap cannot make a box: {said}", fix=_fix_for_namespaces())


def _tool(name: str, fix: str) -> str:
    # not from the caller's PATH: a user's seldom has sbin, and an attacker's may have anything
    path = shutil.which(name, path=_TOOL_PATH)
    if path is None:
        raise ProviderUnavailable("local", f"{name} is not installed", fix=fix)
    return path


def _python_in_usr() -> str | None:
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        real = os.path.realpath(path)
        version = re.fullmatch(r"/usr/(?:.+/)?python3\.(\d+)", real)
        if version and int(version[1]) >= _OLDEST_PYTHON and os.access(real, os.X_OK):
            return real
    return None


def _fix_for_namespaces() -> str:
    for name, (bad, fix) in _SWITCHES.items():
        try:
            if Path("/proc/sys", name).read_text().strip() == bad:
                return fix
        except OSError:
            continue
    return "allow unprivileged user namespaces on this host (in a container: run it with its seccomp profile opened)"
