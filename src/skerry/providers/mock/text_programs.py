"""Programs of every mock box that read and write streams of text and bytes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import AsyncIterator

from skerry.providers.mock.context import Context, Reader
from skerry.providers.mock.handles import CHUNK, open_file
from skerry.providers.mock.tables import Table, options

program = Table()


async def _complain(context: Context, problem: OSError) -> int:
    await context.print(f"{context.argv[0]}: {problem.filename}: {problem.strerror}", err=True)
    return 1


def _reader(context: Context, path: str) -> Reader:
    return context.stdin if path == "-" else Reader(context.process, open_file(context.process, path, "r"))


async def _inputs(context: Context, paths: list[str]) -> AsyncIterator[tuple[str, bytes]]:
    for path in paths or ["-"]:
        yield path, await _reader(context, path).read_all()


@program("cat")
async def _cat(context: Context) -> int:
    _, paths = options(context, "nu")
    status = 0
    for path in paths or ["-"]:
        try:
            reader = _reader(context, path)
            while chunk := await reader.read():
                await context.stdout.write(chunk)
        except OSError as problem:
            status = await _complain(context, problem)
    return status


@program("tee")
async def _tee(context: Context) -> int:
    found, paths = options(context, "a")
    files = [open_file(context.process, path, "a" if found else "w") for path in paths]
    while chunk := await context.stdin.read():
        await context.stdout.write(chunk)
        for file in files:
            await file.write(context.process, chunk)
    return 0


@program("head")
async def _head(context: Context) -> int:
    found, paths = options(context, "q0123456789", "nc")
    count = int(found.get("n") or found.get("c") or "".join(k for k in found if k.isdigit()) or 10)
    for path in paths or ["-"]:
        reader = _reader(context, path)
        if "c" in found:
            left = count
            while left > 0 and (chunk := await reader.read(min(left, CHUNK))):
                await context.stdout.write(chunk)
                left -= len(chunk)
            continue
        for _ in range(count):
            line = await reader.readline()
            if not line:
                break
            await context.stdout.write(line)
    return 0


@program("tail")
async def _tail(context: Context) -> int:
    found, paths = options(context, "qf0123456789", "nc")
    number = found.get("n") or found.get("c") or "".join(k for k in found if k.isdigit()) or "10"
    async for _, data in _inputs(context, paths):
        units = [data[i : i + 1] for i in range(len(data))] if "c" in found else data.splitlines(keepends=True)
        skip = int(number) - 1 if number.startswith("+") else max(0, len(units) - abs(int(number)))
        await context.stdout.write(b"".join(units[skip:]))
    return 0


@program("wc")
async def _wc(context: Context) -> int:
    found, paths = options(context, "lwcm")
    async for path, data in _inputs(context, paths):
        letters = len(data.decode(errors="replace"))
        counts = {"l": data.count(b"\n"), "w": len(data.split()), "c": len(data), "m": letters}
        words = [str(counts[flag]) for flag in "lwcm" if flag in (found or "lwc")]
        await context.print(*words, *([] if path == "-" else [path]))
    return 0


@program("seq")
async def _seq(context: Context) -> int:
    numbers = [int(word) for word in context.argv[1:]]
    first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1])}.get(len(numbers)) or numbers[:3]
    for start in range(first, last + 1, step * 8192) if step > 0 else [first]:
        end = min(last, start + step * 8191) if step > 0 else last
        values = range(start, end + (1 if step > 0 else -1), step)
        await context.stdout.write("".join(f"{value}\n" for value in values))
    return 0


@program("yes")
async def _yes(context: Context) -> int:
    line = (" ".join(context.argv[1:]) or "y") + "\n"
    block = line * max(1, 8192 // len(line))
    while True:
        await context.stdout.write(block)


@program("sort")
async def _sort(context: Context) -> int:
    found, paths = options(context, "nru")
    lines: list[bytes] = []
    async for _, data in _inputs(context, paths):
        lines += data.splitlines()
    if "n" in found:
        lines.sort(key=lambda line: (float((re.match(rb"\s*-?\d+\.?\d*", line) or [b"0"])[0]), line))
    else:
        lines.sort()
    lines = list(dict.fromkeys(lines)) if "u" in found else lines
    lines = lines[::-1] if "r" in found else lines
    await context.stdout.write(b"".join(line + b"\n" for line in lines))
    return 0


@program("uniq")
async def _uniq(context: Context) -> int:
    before = None
    async for _, data in _inputs(context, options(context)[1]):
        for line in data.splitlines():
            if line != before:
                await context.stdout.write(line + b"\n")
            before = line
    return 0


@program("grep")
async def _grep(context: Context) -> int:
    found, words = options(context, "ivnqcFEHhlo", "e")
    pattern = found.get("e") or (words.pop(0) if words else "")
    text = re.escape(pattern) if "F" in found else pattern
    expression = re.compile(os.fsencode(text), re.IGNORECASE if "i" in found else 0)
    hits = 0
    for path in words or ["-"]:
        number = 0
        async for line in _reader(context, path):
            number += 1
            if bool(expression.search(line.rstrip(b"\n"))) == ("v" in found):
                continue
            hits += 1
            if not found.keys() & {"q", "c"}:
                prefix = (f"{path}:" if len(words) > 1 else "") + (f"{number}:" if "n" in found else "")
                await context.stdout.write(os.fsencode(prefix) + line.rstrip(b"\n") + b"\n")
    if "c" in found:
        await context.print(hits)
    return int(not hits)


@program("tr")
async def _tr(context: Context) -> int:
    found, sets = options(context, "ds")
    spans = [_span(text) for text in sets]
    while chunk := await context.stdin.read():
        if "d" in found:
            await context.stdout.write(chunk.translate(None, spans[0]))
        else:
            to = spans[1] + spans[1][-1:] * (len(spans[0]) - len(spans[1]))
            await context.stdout.write(chunk.translate(bytes.maketrans(spans[0], to[: len(spans[0])])))
    return 0


def _span(text: str) -> bytes:
    text = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\0", "\0")
    wide = re.sub(r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), text)
    return wide.encode("latin-1", "replace")


@program("dd")
async def _dd(context: Context) -> int:
    units = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    given = dict(word.split("=", 1) for word in context.argv[1:] if "=" in word)
    match = re.fullmatch(r"(\d+)([kKMG]?)", given.get("bs", "512"))
    if match is None:
        return 1
    size = int(match[1]) * units[match[2]]
    source = _reader(context, given.get("if", "-"))
    target = open_file(context.process, given["of"], "w") if "of" in given else context.fds[1]
    left = size * int(given["count"]) if "count" in given else None
    total = 0
    status = 0
    try:
        while left is None or left > 0:
            chunk = await source.read(CHUNK if left is None else min(left, CHUNK))
            if not chunk:
                break
            await context.process.step()
            await target.write(context.process, chunk)
            total += len(chunk)
            left = None if left is None else left - len(chunk)
    except OSError as problem:
        await context.print(f"dd: error writing '{given.get('of', '-')}': {problem.strerror}", err=True)
        status = 1
    await context.print(f"{total} bytes copied", err=True)
    return status


@program("sha256sum", "md5sum")
async def _sum(context: Context) -> int:
    kind = context.argv[0].rpartition("/")[2].removesuffix("sum")
    async for path, data in _inputs(context, context.argv[1:]):
        await context.print(f"{hashlib.new(kind, data).hexdigest()}  {path}")
    return 0
