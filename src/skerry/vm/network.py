"""A machine's network: it leads out, by way of slirp4netns, and not to what listens on the host's loopback."""

from __future__ import annotations

import os
import shutil

_PATH = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin"
_CIDR = "10.0.3.0/24"
"""Between the machine's namespace and the host; the guest's own network, which its hypervisor makes, is another."""
NAMESERVER = "10.0.3.3"
"""Whom a guest asks for names: it asks the host's own resolver."""


def why_none() -> str | None:
    """None where machines can have one."""
    if os.geteuid() != 0:
        return "only root can give a machine a network that does not lead to the host's own services"
    if shutil.which("slirp4netns", path=_PATH) is None:
        return "slirp4netns is not installed: apt-get install slirp4netns"
    return None


def command() -> list[str]:
    """What joins a namespace to the outside; whose namespace comes after it.

    Its sandbox gives up all mounts that it sees. Where some are shared, such as the named namespaces of `ip netns`,
    the host would lose them too, so it sees copies of its own.
    """
    program = shutil.which("slirp4netns", path=_PATH) or "slirp4netns"
    apart = [shutil.which("unshare", path=_PATH) or "unshare", "--mount", "--propagation=private", "--"]
    safe = ["--disable-host-loopback", "--enable-sandbox", "--enable-seccomp"]
    return [*apart, program, "--configure", "--mtu=65520", f"--cidr={_CIDR}", *safe]
