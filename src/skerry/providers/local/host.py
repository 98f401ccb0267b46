"""Means of this host for boxes, found once: tools, interpreter, system call filter, and the root that boxes share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from skerry.agent import bundle
from skerry.errors import ProviderUnavailable
from skerry.host import spawn, uids
from skerry.providers.local import seccomp
from skerry.providers.local.profile import AGENT, DEFAULT_PATH, HOME, LINKS, PYTHON
from skerry.providers.shared import loopback

T = TypeVar("T")

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
_COREUTILS = "apt-get install coreutils"
_UTIL_LINUX = "apt-get install util-linux"
_NS_GET_USERNS = 0xB701
_TOOL_PATH = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin"
_LAYOUT = "2"
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("dev", "proc", "tmp", "usr", "etc", "var", HOME[1:], PYTHON[1:])
_FROM_ETC = (
    "alternatives", "bash.bashrc", "debian_version", "fonts", "gai.conf", "host.conf", "inputrc", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "magic.mime", "mime.types", "networks", "os-release",
    "pki/ca-trust/extracted", "pki/tls/certs", "profile", "protocols", "rpc", "services", "ssl/cert.pem", "ssl/certs",
    "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""Files that programs look up in /etc and that are the same everywhere; none has a secret or a local name in it."""

_WRITTEN = {
    "passwd": (
        f"root:x:0:0:root:{HOME}:{{shell}}\n"
        f"user:x:1000:1000:user:{HOME}:{{shell}}\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nprotocols: files\nservices: files\n",
    "resolv.conf": loopback.RESOLV_CONF_TEXT,
    "hostname": "sandbox\n",
    "machine-id": "",
}


class Interpreter(NamedTuple):
    """Interpreter of the agent in a box."""

    argv: list[str]
    agent: Path
    portable: Path | None
    """The folder to bind at PYTHON; None if the box's own interpreter is used."""


class found_once(cached_property[T]):
    """A property that is computed once, also where threads ask at the same time: Python's own no longer is."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> T:  # type: ignore[override]
        with instance._finding:
            found: T = super().__get__(instance, owner)
            return found


class Host:
    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._finding = threading.RLock()

    @found_once
    def bwrap(self) -> str:
        return _tool("bwrap", "apt-get install bubblewrap (or your distribution's bubblewrap package)")

    @found_once
    def seccomp_program(self) -> bytes:
        machine = os.uname().machine
        if machine not in seccomp.ARCHITECTURES:
            fix = f"use a host with {' and '.join(seccomp.ARCHITECTURES)}"
            raise ProviderUnavailable("local", f"there is no system call filter for {machine}", fix=fix)
        return seccomp.program(machine)

    @found_once
    def has_own_uids(self) -> bool:
        return uids.are_available()

    def as_uid(self, uid: int | None) -> list[str]:
        """Beginning of a command that runs as this uid, so that bubblewrap never runs as root."""
        if uid is None:
            return []
        # chroot to where we are, for its --userspec: it starts in half the time of setpriv
        chroot = _tool("chroot", _COREUTILS)
        return [chroot, f"--userspec=+{uid}:+{uid}", "--groups=", "/"]

    def open_low_ports(self, pid: int, uid: int | None, log_fd: int) -> int:
        """Start a program that lets everybody in the network of a box listen on any port; returns its pid. The network
        belongs to a user namespace that no process stays in, and a program of many threads, as we are, cannot enter it.
        `uid` is root there, once bubblewrap has said so."""
        with contextlib.ExitStack() as opened:

            def owned(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            network = owned(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            owner = owned(fcntl.ioctl(network, _NS_GET_USERNS))
            null = owned(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            value = owned(os.memfd_create("skerry", os.MFD_CLOEXEC))
            os.pwrite(value, b"0", 0)
            argv = [*self.as_uid(uid), _tool("nsenter", _UTIL_LINUX), "--preserve-credentials"]
            argv += ["--user=/proc/self/fd/3", "--net=/proc/self/fd/4", "--"]
            argv += [_tool("tee", _COREUTILS), loopback.LOW_PORTS_FILE]
            return spawn.spawn(argv, {}, {0: value, 1: null, 2: log_fd, 3: owner, 4: network})

    def why_no_rules(self) -> str | None:
        """Reason why boxes cannot be prepared for rules; None where they can."""
        if shutil.which("nsenter", path=_TOOL_PATH) is None:
            return f"nsenter is not installed: {_UTIL_LINUX}"
        try:
            if not os.statvfs(loopback.LOW_PORTS_FILE).f_flag & os.ST_RDONLY:
                return None
        except OSError:
            return f"this kernel has no {loopback.LOW_PORTS}; use one from 4.11 on"
        return f"{loopback.LOW_PORTS_FILE} is read-only here, as in a container; have it mounted writable"

    @found_once
    def own_interpreter(self) -> Interpreter:
        """For a box with the host's /usr: the interpreter there, or else the portable one."""
        python = _python_in_usr()
        if python is None:
            return self.portable_interpreter
        return Interpreter([python, "-I", "-S", "-B"], bundle.agent_folder(self.cache, python), None)

    @found_once
    def portable_interpreter(self) -> Interpreter:
        """For any other root: what it has may be too old, or nothing."""
        portable = bundle.portable(self.cache)
        return Interpreter(portable.argv(PYTHON), bundle.agent_folder(self.cache, portable.python), portable.folder)

    @found_once
    def skeleton(self) -> Path:
        """The root for the host's system as it is now, with the agent in it; `usr` is for the caller to bind."""
        agent = self.own_interpreter.agent
        folder = self.cache / f"root-{_key(agent, self.links)}"
        if not folder.is_dir():
            bundle.make_folder(folder, lambda aside: _fill(aside, agent, self.links))
        return folder

    @found_once
    def links(self) -> dict[str, str]:
        """Names of programs that boxes know and this host does not, and what each is here."""
        python = shutil.which("python3", path=DEFAULT_PATH)
        return {"python": python} if python and not shutil.which("python", path=DEFAULT_PATH) else {}

    def check(self) -> None:
        """Raise ProviderUnavailable, with the fix, unless a bare box can be made here."""
        if os.uname().sysname != "Linux":
            raise ProviderUnavailable("local", "it needs Linux", fix="use a Linux host, or another provider")
        _ = self.seccomp_program
        command = [*self.as_uid(uids.take() if self.has_own_uids else None), self.bwrap]
        command += ["--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
        command += ["--", shutil.which("true") or "/bin/true"]
        try:
            tried = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
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
        with suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == bad:
                return fix
    return "allow unprivileged user namespaces on this host (in a container: run it with its seccomp profile opened)"


def unmerged_folders() -> list[str]:
    """Top-level folders that on this host are no links into /usr, and so need a mount of their own."""
    return [f"/{name}" for name in _TOP_LEVEL if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]


def _key(agent: Path, links: dict[str, str]) -> str:
    digest = hashlib.sha256(f"{_LAYOUT}\0{agent.name}\0{_WRITTEN}\0{links}".encode())
    for name in (*(f"/etc/{name}" for name in _FROM_ETC), *(f"/{name}" for name in _TOP_LEVEL)):
        with suppress(OSError):
            seen = os.lstat(name)
            digest.update(f"\0{name}\0{seen.st_mtime_ns}\0{seen.st_size}".encode())
    return digest.hexdigest()[:16]


def _fill(root: Path, agent: Path, links: dict[str, str]) -> None:
    for name in _EMPTY:
        (root / name).mkdir(parents=True)
    (root / "var/tmp").symlink_to("/tmp")
    _fill_etc(root / "etc")
    shutil.copytree(agent, root / AGENT[1:])
    (root / LINKS[1:]).mkdir()
    for name, target in links.items():
        (root / LINKS[1:] / name).symlink_to(target)
    for name in _TOP_LEVEL:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif os.path.isdir(f"/{name}"):
            (root / name).mkdir()


def _fill_etc(etc: Path) -> None:
    for name in _FROM_ETC:
        source, target = Path("/etc", name), etc / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_secrets)
        elif source.is_file() and _is_public(source):
            shutil.copyfile(source, target)
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text.format(shell=shell))
    (etc / "mtab").symlink_to("/proc/self/mounts")


def _secrets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not _is_public(Path(folder, name))]


def _is_public(path: Path) -> bool:
    return path.is_symlink() or path.is_dir() or bool(path.stat().st_mode & 0o004)
