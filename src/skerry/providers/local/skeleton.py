"""The read-only root that boxes of the host's own system share: made once, bound as one mount."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from skerry.errors import ProviderError

HOME = "/home/user"
AGENT = "/.skerry/agent"
PYTHON = "/.skerry/python"

_LAYOUT = "1"
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY = ("dev", "proc", "tmp", "usr", "etc", "var", HOME[1:], PYTHON[1:])
_FROM_ETC = (
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "profile",
    "protocols",
    "rpc",
    "services",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""What programs look up in /etc and that is the same for all the world; nothing with a secret or a local name in it."""

_WRITTEN = {
    "passwd": (
        f"root:x:0:0:root:{HOME}:{{shell}}\n"
        f"user:x:1000:1000:user:{HOME}:{{shell}}\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nprotocols: files\nservices: files\n",
    "resolv.conf": "",
    "hostname": "sandbox\n",
    "machine-id": "",
}


def skeleton(cache: Path, agent: Path) -> Path:
    """The folder for the host's system as it is now, with that agent in it; `usr` is for the caller to bind."""
    folder = cache / f"root-{_key(agent)}"
    if not folder.is_dir():
        try:
            _build_aside(cache, folder, agent)
        except OSError as error:
            raise ProviderError(f"cannot build {folder}: {error}") from error
    return folder


def unmerged_folders() -> list[str]:
    """Top-level folders that on this host are no links into /usr, and so need a mount of their own."""
    return [f"/{name}" for name in _TOP_LEVEL if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]


def _key(agent: Path) -> str:
    digest = hashlib.sha256(f"{_LAYOUT}\0{agent.name}\0{_WRITTEN}".encode())
    for name in (*(f"/etc/{name}" for name in _FROM_ETC), *(f"/{name}" for name in _TOP_LEVEL)):
        try:
            seen = os.lstat(name)
            digest.update(f"\0{name}\0{seen.st_mtime_ns}\0{seen.st_size}".encode())
        except OSError:
            continue
    return digest.hexdigest()[:16]


def _build_aside(cache: Path, folder: Path, agent: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as parent:
        aside = Path(parent, folder.name)
        for name in _EMPTY:
            (aside / name).mkdir(parents=True)
        (aside / "var/tmp").symlink_to("/tmp")
        _link_top_level(aside)
        _fill_etc(aside / "etc")
        shutil.copytree(agent, aside / AGENT[1:])
        for path, _, _ in os.walk(aside):
            os.chmod(path, 0o755)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # someone else was faster, and built the same
                raise


def _link_top_level(root: Path) -> None:
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
            shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
        elif source.is_file() and _is_public(source):
            shutil.copyfile(source, target)
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text.format(shell=shell))
    (etc / "mtab").symlink_to("/proc/self/mounts")


def _unreadable(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not _is_public(Path(folder, name))]


def _is_public(path: Path) -> bool:
    return path.is_symlink() or path.is_dir() or bool(path.stat().st_mode & 0o004)
