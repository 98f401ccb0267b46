"""`skerry cp`: files and folders between here and a sandbox."""

from __future__ import annotations

import os
import posixpath
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from skerry.cli.options import refuse_if
from skerry.cli.output import spinner
from skerry.cli.registry import with_sandbox
from skerry.cli.terminal import STDIN, write_all
from skerry.errors import FileError, PathNotFound, SkerryError, TooLarge
from skerry.units import parse_size

if TYPE_CHECKING:
    from skerry.sandbox.sandbox import AsyncSandbox

_HERE = ("", ".", "..")
_HEADERS = 16 << 20
_PATH = click.Path()  # so that a shell completes files


@click.command()
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option("--max-size", metavar="SIZE", help="The most that may come out (default: what the sandbox may hold).")
def cp(source: str, target: str, max_size: str | None) -> None:
    """Copy files and folders into a sandbox or out of it.

    One of SOURCE and TARGET is SANDBOX:PATH, the other a path here. A folder that is there gets the copy inside;
    SOURCE/. means what is in a folder. `-` is standard input or output: a file's content, or a tar stream of a folder.
    """
    (giver, origin), (taker, goal) = _parse(source), _parse(target)
    refuse_if((giver is None) == (taker is None), "one of the two must be SANDBOX:PATH")
    most = None if max_size is None else parse_size(max_size, "--max-size")

    async def copy(sandbox: AsyncSandbox) -> None:
        async with spinner(f"copying {source} to {target}"):
            if giver is None:
                await _into(sandbox, origin, goal)
            else:
                await _out_of(sandbox, origin, goal, most)

    try:
        with_sandbox(giver or taker or "", copy)
    except (SkerryError, BrokenPipeError):
        raise
    except OSError as error:
        here = error.filename or origin if giver is None else goal
        raise FileError(f"{os.fsdecode(here)}: {error.strerror}") from None


def _parse(text: str) -> tuple[str | None, str]:
    """Sandbox and path of `SANDBOX:PATH`; what has no colon, or begins with `/` or `.`, is a path here."""
    sandbox, colon, path = text.partition(":")
    is_here = not colon or text.startswith((".", "/"))
    return (None, text) if is_here else (sandbox, path or ".")


async def _into(sandbox: AsyncSandbox, local: str, remote: str) -> None:
    is_folder = await _is_folder(sandbox, remote)
    if local == "-":
        with _standard_input() as data:
            if is_folder or remote.endswith("/"):
                await sandbox.files.write_tar(remote, data)
            else:
                await sandbox.files.write(remote, data)
        return
    name = posixpath.basename(local.rstrip("/"))
    inside = (is_folder or remote.endswith("/")) and name not in _HERE
    await sandbox.files.upload(local, posixpath.join(remote, name) if inside else remote)


async def _out_of(sandbox: AsyncSandbox, remote: str, local: str, most: int | None) -> None:
    if local == "-":
        await _to_standard_output(sandbox, remote, most)
        return
    name = posixpath.basename(remote.rstrip("/"))
    inside = os.path.isdir(local) and name not in _HERE
    await sandbox.files.download(remote, os.path.join(local, name) if inside else local, max_bytes=most)


async def _to_standard_output(sandbox: AsyncSandbox, remote: str, most: int | None) -> None:
    """Write a file, or a folder as a tar. Raises TooLarge if it is larger than it may be."""
    is_folder = await _is_folder(sandbox, remote)
    bound, too_much = sandbox.files._bound(remote, most)
    left = 2 * bound + _HEADERS if is_folder else bound  # a tar has some more than the content of its files
    async for chunk in sandbox.files.read_tar(remote) if is_folder else sandbox.files.iter_chunks(remote):
        left -= len(chunk)
        if left < 0:
            raise TooLarge(too_much)
        await write_all(1, chunk)


class _Input(NamedTuple):
    """Standard input, until the file `ended` is closed."""

    ended: int

    def read(self, size: int, /) -> bytes:
        ready, _, _ = select.select([STDIN, self.ended], [], [])
        return b"" if self.ended in ready else os.read(STDIN, size)


@contextmanager
def _standard_input() -> Iterator[_Input]:
    """Give standard input to a thread, and free it at the end: one that waits for a key would outlast Ctrl-C."""
    ended, end = os.pipe()  # the reading side stays open: the thread may still look at it
    try:
        yield _Input(ended)
    finally:
        os.close(end)


async def _is_folder(sandbox: AsyncSandbox, path: str) -> bool:
    try:
        return (await sandbox.files.stat(path)).is_dir
    except PathNotFound:
        return False
