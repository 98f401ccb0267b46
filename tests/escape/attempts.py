"""All cases of the catalogue, tried in boxes of one kind, and what their ends mean."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from skerry.errors import SkerryError
from skerry.model.spec import SpecOptions
from skerry.sandbox.sandbox import AsyncSandbox

from .boxes import Make, as_user

INSIDE = Path(__file__).with_name("inside")
STARTER = "import sys; sys.path.insert(0, '/home/user'); import inside.run"
PYTHON = ("python3", "-B")
SECRET = "PASSWORD_OF_THE_MANAGER"
ROOM: SpecOptions = {"pids": 64, "disk": "32M"}
MEMORY: SpecOptions = {"memory": "320M"}
WAYS, BOUNDS, HOARDS = "ABCDEFG", "H", "J"
NETWORK = "G"
_TIMEOUT_S = 400.0
_NOT_THERE = {
    *("ENOENT", "ESRCH", "ENXIO", "ENODEV", "ENOTDIR"),
    *("ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "timed out"),
}
_RANKS = ("absent", "refused", "limited", "unclear", "open")


def meaning(id: str, end: str) -> str:
    """What the end of an attempt says, from inside; that the host is as it was is seen from outside."""
    if end.startswith("got in"):
        return "open"
    if end == "limited" or (id[0] in BOUNDS + HOARDS and end in ("killed by 9", "the box ended")):
        return "limited"
    if id[0] in HOARDS and (end == "hung" or end.startswith("killed by")):  # or wait there, or end it without a word
        return "limited"
    if end == "the box ended":
        return "open"
    if end.startswith("killed by") or end in errno.errorcode.values():
        return "absent" if end in _NOT_THERE else "refused"
    return "absent" if end in _NOT_THERE else "unclear"


@contextmanager
def of_the_host(folder: Path) -> Iterator[list[str]]:
    """What boxes are to find nothing of, in the words of the probe; it is seen afterwards that it was left alone."""
    secret = folder / f"of-the-host-{os.getpid()}"
    secret.write_text("x")
    name = f"skerry-test-{os.getpid()}"
    with (
        subprocess.Popen(["sleep", "600"]) as victim,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket() as tcp,
    ):
        try:
            for listener, address in ((abstract, f"\0{name}"), (tcp, ("0.0.0.0", 0))):
                listener.bind(address)
                listener.listen()
                listener.setblocking(False)
            yield [str(secret), str(victim.pid), name, str(tcp.getsockname()[1])]
            for listener in (abstract, tcp):
                try:
                    listener.accept()
                except BlockingIOError:
                    continue
                raise AssertionError("a box reached what listens on the host")
            assert victim.poll() is None
        finally:
            victim.kill()


async def tried(
    make: Make, facts: Sequence[str], python: Sequence[str], limits_memory: bool, classes: str = WAYS + BOUNDS
) -> dict[str, str]:
    """How each case ended, at its worst: as the box's user, and as its root. Memory is hoarded only where it is
    limited."""
    ends: dict[str, str] = {}
    memory: SpecOptions = MEMORY if limits_memory else {}
    classes += HOARDS if limits_memory else ""
    for user in (None, "root"):
        async for id, end in probe(make, {**ROOM, **memory, **as_user(user)}, python, classes, facts):
            if rank(id, end) >= rank(id, ends.get(id, "ENOENT")):
                ends[id] = end
    return ends


def rank(id: str, end: str) -> int:
    return _RANKS.index(meaning(id, end))


async def probe(
    make: Make, options: SpecOptions, python: Sequence[str], classes: str, facts: Sequence[str]
) -> AsyncIterator[tuple[str, str]]:
    """Each case with its end. One that ends its box is told so, and the next box goes on after it."""
    last: str | None = ""
    while last is not None:
        sandbox = await make(options)
        for path in sorted(INSIDE.glob("*.py")):
            await sandbox.files.write(f"/home/user/inside/{path.name}", path.read_bytes())
        argv = [*python, "-c", STARTER, classes, last, *facts]
        begun, last = last, None
        async for line in _lines(sandbox, argv):
            id, _, end = line.partition(" ")
            if not end:
                last = id
            yield id, end or "the box ended"
        assert last is None or last > begun
        await sandbox.destroy()


async def _lines(sandbox: AsyncSandbox, argv: list[str]) -> AsyncIterator[str]:
    """What the probe says: an id as it begins, its end as it has ended. The kernel may choose the probe itself, when
    memory is out; then it is as if the box had ended."""
    said = errors = b""
    with suppress(SkerryError):
        process = await sandbox.start(argv, env={"SKERRY_PROBE": "inside"}, timeout_s=_TIMEOUT_S)
        async for number, chunk in process:
            said, errors = (said + chunk, errors) if number == 1 else (said, errors + chunk)
    assert not errors, errors.decode()
    for line in said.decode().splitlines():
        yield line
