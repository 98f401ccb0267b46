"""The programs that every mock box has, besides those that a test defines."""

from __future__ import annotations

import errno
import io
import os
import shutil

from skerry.agent.guest import trees
from skerry.providers.mock.process import CHUNK, Context, Pipe, Program
from skerry.providers.mock.shell import shell


def _split(context: Context) -> tuple[str, list[str]]:
    """The letters of a program's options, and its other arguments."""
    words = context.argv[1:]
    return "".join(word[1:] for word in words if word[:1] == "-"), [word for word in words if word[:1] != "-"]


async def _input(context: Context, paths: list[str]) -> bytes:
    return b"".join([context.read_file(path) for path in paths]) if paths else await context.stdin.read_all()


async def _echo(context: Context) -> None:
    words = context.argv[1:]
    is_open = words[:1] == ["-n"]
    await context.stdout.write(" ".join(words[is_open:]) + ("" if is_open else "\n"))


async def _printf(context: Context) -> None:
    form, words = context.argv[1].replace("\\n", "\n"), context.argv[2:]
    count = form.count("%s")
    for at in range(0, len(words) or 1, count or len(words) or 1):
        await context.stdout.write(form % tuple([*words[at:], *[""] * count][:count]))


async def _cat(context: Context) -> None:
    for path in context.argv[1:]:
        await context.stdout.write(context.read_file(path))
    while len(context.argv) == 1 and (data := await context.stdin.read()):
        await context.stdout.write(data)


async def _seq(context: Context) -> None:
    first, last = ["1", *context.argv[1:]][-2:]
    await context.stdout.write("".join(f"{number}\n" for number in range(int(first), int(last) + 1)))


async def _yes(context: Context) -> None:
    while True:
        await context.stdout.write(b"y\n" * 512)
        await context.sleep(1 / 64)  # so that it meets its timeout


async def _head(context: Context) -> None:
    option, count, *paths = context.argv[1:] if len(context.argv) > 2 else ["-n", "10", *context.argv[1:]]
    left, source = int(count), Pipe(context, context.open(paths[0])) if paths else context.stdin
    while left > 0 and (data := await (source.read(min(left, CHUNK)) if option == "-c" else source.readline())):
        left -= len(data) if option == "-c" else 1
        await context.stdout.write(data)


async def _sort(context: Context) -> None:
    options, paths = _split(context)
    lines = sorted((await _input(context, paths)).splitlines(), reverse="r" in options)
    await context.stdout.write(b"".join(line + b"\n" for line in lines))


async def _wc(context: Context) -> None:
    options, paths = _split(context)
    data = await _input(context, paths)
    await context.print(data.count(b"\n") if "l" in options else len(data))


async def _ls(context: Context) -> None:
    for path in context.argv[1:] or ["."]:
        await context.stdout.write(b"".join(name + b"\n" for name in sorted(os.listdir(context.locate(path)))))


def _mkdir(context: Context) -> None:
    options, paths = _split(context)
    for path in paths:
        (os.makedirs if "p" in options else os.mkdir)(context.locate(path, change=True))


def _rm(context: Context) -> None:
    options, paths = _split(context)
    for place in [context.locate(path, follow=False, change=True) for path in paths]:
        if "r" in options and os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif "f" not in options or os.path.lexists(place):
            os.unlink(place)


def _touch(context: Context) -> None:
    for path in context.argv[1:]:
        context.open(path, os.O_WRONLY | os.O_CREAT)


async def _trees(context: Context) -> int:
    """Pack or unpack for the agent, as its `trees.py` does in a process of its own: the path is a real one."""
    verb, path = context.argv[2:]
    source, packed, failure = io.BytesIO(), bytearray(), ""
    while verb == "unpack" and (data := await context.stdin.read()):
        source.write(data)
    try:
        context.files.take_room(source.tell())
        source.seek(0)
        failure = trees.main(verb, path, source.read, packed.extend)
    except OSError as problem:
        failure = f"{errno.ENOSPC} : {problem.strerror}"
    await context.stdout.write(bytes(packed))
    await context.stderr.write(failure)
    return 2 if failure else 0


PROGRAMS: dict[str, Program] = {
    "sh": shell, "bash": shell, "true": lambda _: 0, "false": lambda _: 1, "echo": _echo, "printf": _printf,
    "cat": _cat, "seq": _seq, "yes": _yes, "head": _head, "sort": _sort, "wc": _wc, "ls": _ls, "mkdir": _mkdir,
    "rm": _rm, "trees": _trees, "touch": _touch, "sleep": lambda context: context.sleep(float(context.argv[1])),
    "pwd": lambda context: context.print(context.cwd), "id": lambda context: context.print(context.uid),
    "env": lambda context: context.stdout.write("".join(f"{name}={value}\n" for name, value in context.env.items())),
}  # fmt: skip
