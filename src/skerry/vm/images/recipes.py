"""What images of ours consist of: tables, and nothing else."""

from __future__ import annotations

import hashlib
import os

import msgspec

from skerry.errors import InvalidSpec

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

    def key(self, kernel: str) -> str:
        """Changes with all that it says."""
        said = msgspec.json.encode((FORMAT, os.uname().machine, kernel if self.modules else "", self))
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
        packages=("docker.io", "containerd", "runc", "kmod", "iptables", "ca-certificates", "procps", "iproute2"),
        removed=(
            "usr/libexec/docker", "usr/bin/docker", "usr/bin/docker-proxy", "usr/bin/ctr", "usr/bin/containerd-shim",
            "usr/bin/containerd-shim-runc-v1", "usr/bin/containerd-stress", "var/lib/dpkg/info",
        ),
        modules=(
            "overlay", "bridge", "br_netfilter", "veth", "nf_tables", "nft_compat", "nft_chain_nat", "nf_nat",
            "nf_conntrack", "xt_conntrack", "xt_addrtype", "xt_MASQUERADE", "xt_comment", "xt_mark", "ip_tables",
            "iptable_nat", "iptable_filter", "tun", "loop",
        ),
        env=_PATH,
    ),
}  # fmt: skip


def find(name: str) -> Recipe:
    try:
        return RECIPES[name]
    except KeyError:
        raise InvalidSpec(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}", field="recipe") from None
