"""What of this host a machine depends on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from skerry.errors import ProviderUnavailable

_PROGRAM = "qemu-system-x86_64"
_PATH = "/usr/bin:/usr/local/bin:/bin"
_FIX = "apt-get install qemu-system-x86 (or your distribution's package of QEMU for x86)"
_TIMEOUT_S = 20
_CPUINFO = Path("/proc/cpuinfo")
_SCALING = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def program() -> str:
    path = shutil.which(_PROGRAM, path=_PATH)
    if path is None:
        raise ProviderUnavailable("qemu", f"{_PROGRAM} is not installed", fix=_FIX)
    return path


def version(cache: Path) -> str:
    """With the packager's own number: what one build has saved another may not restore. Asked once for each program
    that is installed: it takes as long to tell as a clone to start."""
    path = program()
    status = os.stat(path)
    known = cache / f"qemu-{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    try:
        return known.read_text()
    except FileNotFoundError:
        found = _ask(path)
    remember(known, found)
    return found


def remember(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def _ask(path: str) -> str:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True, env={})
    except (OSError, subprocess.SubprocessError) as error:
        raise ProviderUnavailable("qemu", f"QEMU cannot be run: {error}", fix=_FIX) from error
    found = re.search(r"version (\d+\.\d+.*)", said.stdout.decode(errors="replace"))
    if found is None:
        raise ProviderUnavailable("qemu", f"{_PROGRAM} does not tell its version", fix=_FIX)
    return found[1].strip()


def numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    return found[1].strip() if found else "unknown"


def tsc_khz(cpuinfo: Path = _CPUINFO, scaling: Path = _SCALING) -> int | None:
    """How fast the clock of the processor ticks; None where it only tells how fast it happens to run."""
    try:
        return int((scaling / "base_frequency").read_text())
    except OSError:
        found = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo.read_text(), re.MULTILINE)
    return None if found is None or scaling.exists() else int(float(found[1]) * 1000)
