"""`skerry cp`: files and folders between here and a sandbox."""

from __future__ import annotations

import os
import posixpath
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from skerry.cli.output import spinner
from skerry.cli.pipes import write_all
from skerry.cli.terminal import STDIN

if TYPE_CHECKING:
    from skerry.sandbox import AsyncSandbox

_HERE = ("", ".", "..")
_PATH = click.Path()  # so that a shell completes files


class Place(NamedTuple):
    """A path, in a sandbox or here."""

    sandbox: str | None
    path: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """`SANDBOX:PATH`; what has no colon, or begins with `/` or `.`, is here."""
        sandbox, colon, path = text.partition(":")
        if not colon or text.startswith((".", "/")):
            return cls(None, text)
        return cls(sandbox, path or ".")


@click.command()
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
def command(source: str, target: str) -> None:
    """Copy files and folders into a sandbox or out of it.

    One of SOURCE and TARGET is SANDBOX:PATH, the other a path here. A folder that is there gets the copy inside;
    SOURCE/. means what is in a folder. `-` is standard input or output: a file's content, or a tar stream of a folder.
    """
    origin, goal = Place.parse(source), Place.parse(target)
    if (origin.sandbox is None) == (goal.sandbox is None):
        raise click.UsageError("one of the two must be SANDBOX:PATH", click.get_current_context())
    from skerry.cli.registry import with_sandbox

    async def copy(sandbox: AsyncSandbox) -> None:
        async with spinner(f"copying {source} to {target}"):
            if origin.sandbox is None:
                await _into(sandbox, origin.path, goal.path)
            else:
                await _out_of(sandbox, origin.path, goal.path)

    from skerry.errors import FileError, SkerryError

    try:
        with_sandbox(origin.sandbox or goal.sandbox or "", copy)
    except (SkerryError, BrokenPipeError):
        raise
    except OSError as error:
        here = error.filename or origin.path if origin.sandbox is None else goal.path
        raise FileError(f"{os.fsdecode(here)}: {error.strerror}") from None


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


async def _out_of(sandbox: AsyncSandbox, remote: str, local: str) -> None:
    if local == "-":
        is_folder = await _is_folder(sandbox, remote)
        async for chunk in sandbox.files.read_tar(remote) if is_folder else sandbox.files.iter_chunks(remote):
            await write_all(1, chunk)
        return
    name = posixpath.basename(remote.rstrip("/"))
    inside = os.path.isdir(local) and name not in _HERE
    await sandbox.files.download(remote, os.path.join(local, name) if inside else local)


class _Input(NamedTuple):
    """Standard input, until the other file has ended."""

    ended: int

    def read(self, size: int, /) -> bytes:
        ready, _, _ = select.select([STDIN, self.ended], [], [])
        return b"" if self.ended in ready else os.read(STDIN, size)


@contextmanager
def _standard_input() -> Iterator[_Input]:
    """Standard input for a thread, which is let go at the end: one that waits for a key would outlast Ctrl-C."""
    ended, end = os.pipe()  # the reading side stays open: the thread may still look at it
    try:
        yield _Input(ended)
    finally:
        os.close(end)


async def _is_folder(sandbox: AsyncSandbox, path: str) -> bool:
    from skerry.errors import PathNotFound

    try:
        return (await sandbox.files.stat(path)).is_dir
    except PathNotFound:
        return False
