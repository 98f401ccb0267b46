"""Programs that images are made with: run to their end, or ended with whoever waits for them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
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
"""Which of Debian's packages has a program."""
_ELSEWHERE = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_KEPT_LINES = 20
_KILL_S = 10.0


def find(program: str) -> str:
    """Where it is. Raises ProviderError with the package that brings it."""
    path = shutil.which(program, path=_search_path())
    if path is None:
        raise ProviderError(f"{program} is not installed, which this needs: apt-get install {PACKAGES[program]}")
    return path


def is_there(program: str) -> bool:
    return shutil.which(program, path=_search_path()) is not None


def _search_path() -> str:
    """Where programs are, also those that only root is thought to run."""
    return os.pathsep.join((*os.get_exec_path(), *_ELSEWHERE))


async def run(
    program: str,
    *arguments: str | Path,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> str:
    """What it wrote to its output; `on_line` is told of that and of its errors, line by line."""
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
    output: list[str] = []
    errors: deque[str] = deque(maxlen=_KEPT_LINES)
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
    while line := await _line(stream):
        keep(line)
        on_line(line.rstrip())


async def _line(stream: asyncio.StreamReader) -> str:
    try:
        return (await stream.readuntil(b"\n")).decode(errors="replace")
    except asyncio.IncompleteReadError as error:
        return error.partial.decode(errors="replace")
    except asyncio.LimitOverrunError as error:
        return (await stream.readexactly(error.consumed)).decode(errors="replace")
