"""Recipes of our own images: packages of Debian, or busybox with the files that programs look for."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import msgspec

from skerry.errors import InvalidSpec
from skerry.oci.roots import Entry
from skerry.vm.images import tree

FORMAT = "1"
"""Counted up when the same recipe would make something else."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """An image of Debian's packages; without a suite it is busybox and a few files alone."""

    about: str
    suite: str = ""
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Paths that packages bring and nobody needs."""
    modules: tuple[str, ...] = ()
    """Of the kernel: the image goes with that kernel alone then."""
    env: dict[str, str] = {}
    brings_python: bool = False
    """Whether the agent's interpreter is in it too, made of its own package, for hosts that are no Linux."""

    def key(self, kernel: str) -> str:
        """Changes with all that it says."""
        told = msgspec.to_builtins(self)
        if not self.brings_python:
            del told["brings_python"]  # as before there was such a thing: images that were made stay good
        said = msgspec.json.encode((FORMAT, os.uname().machine, kernel if self.modules else "", told))
        return hashlib.sha256(said).hexdigest()[:32]


_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

RECIPES: dict[str, Recipe] = {
    "minimal": Recipe(about="busybox: a shell and small programs, 2 MB"),
    "debian-devbox": Recipe(
        about="Debian with Python, Node, git and a compiler",
        suite="bookworm",
        packages=(
            "bash", "build-essential", "ca-certificates", "curl", "git", "iproute2", "jq", "less", "make", "nano",
            "nodejs", "npm", "openssh-client", "patch", "pkg-config", "procps", "python3", "python3-dev",
            "python3-pip", "python3-venv", "ripgrep", "rsync", "sqlite3", "unzip", "xz-utils", "zip",
        ),
        env=_PATH,
    ),
    "docker": Recipe(
        about="Debian with a Docker engine, for machines that run containers",
        suite="trixie",
        packages=(
            "docker.io", "containerd", "runc", "kmod", "iptables", "ca-certificates", "procps", "iproute2", "python3",
        ),
        removed=(
            "usr/libexec/docker", "usr/bin/docker", "usr/bin/docker-proxy", "usr/bin/ctr", "usr/bin/containerd-shim",
            "usr/bin/containerd-shim-runc-v1", "usr/bin/containerd-stress", "var/lib/dpkg/info",
            "usr/lib/python3", "usr/lib/python3.13", "usr/bin/python3", "usr/bin/python3.13", "usr/share/python3",
        ),
        modules=(
            "overlay", "bridge", "br_netfilter", "veth", "nf_tables", "nft_compat", "nft_chain_nat", "nf_nat",
            "nf_conntrack", "xt_conntrack", "xt_addrtype", "xt_MASQUERADE", "xt_comment", "xt_mark", "ip_tables",
            "iptable_nat", "iptable_filter", "tun", "loop",
        ),
        env=_PATH,
        brings_python=True,
    ),
}  # fmt: skip


def find(name: str) -> Recipe:
    try:
        return RECIPES[name]
    except KeyError:
        raise InvalidSpec(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}", field="recipe") from None


_FOLDERS = ("bin", "etc", "sbin", "usr", "usr/bin", "usr/local", "usr/local/bin", "usr/sbin", "var")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/hostname": "",
    "etc/machine-id": "",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/os-release": 'ID=skerry\nNAME="skerry minimal"\nPRETTY_NAME="skerry minimal"\n',
    "etc/profile": "export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n",
}


def minimal_root(busybox: Path) -> list[Entry]:
    """The smallest image: busybox under all its names, and a few files."""
    listed = subprocess.run([busybox, "--list"], capture_output=True, check=True, timeout=10, text=True)
    return [
        *(tree.folder_entry(name) for name in _FOLDERS),
        tree.folder_entry("root", 0o700),
        tree.folder_entry("var/tmp", 0o1777),
        tree.file_entry("bin/busybox", busybox.read_bytes(), 0o755),
        *(tree.file_entry(name, text.encode()) for name, text in _FILES.items()),
        *(tree.link_entry(f"bin/{name}", "busybox") for name in sorted(listed.stdout.split()) if name != "busybox"),
        tree.link_entry("usr/bin/env", "../../bin/busybox"),
    ]
