"""Programs that images are made with: run to their end, or ended with whoever waits for them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from skerry.errors import ProviderError

PACKAGES = {
    "apt-cache": "apt",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "lz4": "lz4",
    "make": "make",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "tar": "tar",
    "zstd": "zstd",
}
"""Debian's packages by the programs that they bring."""
_ELSEWHERE = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/opt/homebrew/opt/e2fsprogs/sbin")
_KILL_S = 10.0


def find(program: str) -> str:
    """Find a program. Raises ProviderError with the package that brings it."""
    path = which(program)
    if path is None:
        installer = "brew" if sys.platform == "darwin" else "apt-get"
        raise ProviderError(f"{program} is not installed, which this needs: {installer} install {PACKAGES[program]}")
    return path


def which(program: str) -> str | None:
    return shutil.which(program, path=_search_path())


def _search_path() -> str:
    """PATH of programs, also of those that only root is thought to run."""
    return os.pathsep.join((*os.get_exec_path(), *_ELSEWHERE))


async def run(
    program: str,
    *arguments: str | Path,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    keep: bool = True,
) -> str:
    """Run a program to its end; returns its output, if that is to be kept. `on_line` gets all that it says. Raises
    ProviderError."""
    settings = {"PATH": _search_path(), "LC_ALL": "C.UTF-8", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        "env",
        *(f"{name}={value}" for name, value in settings.items()),
        find(program),
        *(os.fspath(each) for each in arguments),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    output: deque[str] = deque(maxlen=None if keep else 0)
    errors: deque[str] = deque(maxlen=20)
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as both:
            both.create_task(_read(process.stdout, output.append, on_line))
            both.create_task(_read(process.stderr, errors.append, on_line))
        async with asyncio.timeout(_KILL_S):
            code = await process.wait()
    except TimeoutError:
        raise ProviderError(f"{program} did not end within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(_KILL_S):
                await process.wait()
    if code:
        words = "".join(errors).strip() or "it said nothing"
        raise ProviderError(f"{program} failed with code {code}: {words}")
    return "".join(output)


async def _read(stream: asyncio.StreamReader, keep: Callable[[str], object], on_line: Callable[[str], None]) -> None:
    line = b"\n"
    while line:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            line = await stream.readexactly(error.consumed)
        if text := line.decode(errors="replace"):
            keep(text)
            on_line(text.rstrip())
