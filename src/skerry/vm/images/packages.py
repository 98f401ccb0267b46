"""Debian's packages, fetched and unpacked without being installed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from skerry.errors import ProviderError
from skerry.progress import OnProgress, Progress
from skerry.vm.images import programs

_ASK_S = 60.0
_FETCH_S = 900.0
_UNPACK_S = 300.0
_DEPENDS = re.compile(r"^\s*Depends: (\S+)$", re.MULTILINE)


async def depended_on(package: str, prefix: str) -> str:
    """The package that another stands for, such as the newest kernel's."""
    text = await programs.run("apt-cache", "depends", package, timeout_s=_ASK_S)
    for name in _DEPENDS.findall(text):
        if name.startswith(prefix):
            return str(name)
    raise ProviderError(f"apt knows no {package}: run `apt-get update`, on Debian or what is made of it")


async def unpack(package: str, into: Path, on_progress: OnProgress) -> str:
    """Fetch it, checked by apt, and put its files into a folder; its version."""
    on_progress(Progress(f"fetching {package}"))
    fetched = into / ".fetched"
    fetched.mkdir(parents=True)
    # As root apt would fetch as another user, who cannot write here.
    options = ("-o", "APT::Sandbox::User=root") if os.geteuid() == 0 else ()
    await programs.run("apt-get", *options, "download", package, cwd=fetched, timeout_s=_FETCH_S)
    files = list(fetched.glob("*.deb"))
    if len(files) != 1:
        raise ProviderError(f"apt fetched {len(files)} files for {package}, not one")
    on_progress(Progress(f"unpacking {package}"))
    await programs.run("dpkg-deb", "-x", files[0], into, timeout_s=_UNPACK_S)
    version = await programs.run("dpkg-deb", "-f", files[0], "Version", timeout_s=_ASK_S)
    files[0].unlink()
    fetched.rmdir()
    return version.strip()
