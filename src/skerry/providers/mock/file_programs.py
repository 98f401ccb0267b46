"""Programs of every mock box that work on files and folders."""

from __future__ import annotations

import os
import posixpath
import re
import stat as modes
from datetime import UTC, datetime

from skerry.providers.mock.context import Context
from skerry.providers.mock.filesystem import Node
from skerry.providers.mock.kernel import Exit
from skerry.providers.mock.tables import Table, options

program = Table()


def _describe(name: str, node: Node) -> str:
    when = datetime.fromtimestamp(node.mtime, UTC).strftime("%b %d %H:%M")
    arrow = f" -> {os.fsdecode(node.target)}" if node.is_link else ""
    return f"{modes.filemode(node.mode)} {node.links} {node.uid} {node.gid} {node.size} {when} {name}{arrow}"


@program("ls")
async def _ls(context: Context) -> int:
    found, paths = options(context, "la1AdRh")
    process, files, status = context.process, context.process.machine.files, 0
    for path in paths or ["."]:
        where = process.path(path)
        try:
            node = files.find(where, process.uid, follow="l" not in found)
            entries = [(path, node)]
            if node.is_dir and "d" not in found:
                files.demand(node, "r", process.uid, where)
                named = sorted((os.fsdecode(name), child) for name, child in node.children.items())
                entries = [(name, child) for name, child in named if "a" in found or "A" in found or name[0] != "."]
        except OSError as problem:
            await context.print(f"ls: cannot access '{path}': {problem.strerror}", err=True)
            status = 2
            continue
        if len(paths) > 1 and node.is_dir:
            await context.print(f"{path}:")
        lines = [_describe(name, child) if "l" in found else name for name, child in entries]
        await context.stdout.write("".join(f"{line}\n" for line in lines))
    return status


@program("mkdir")
async def _mkdir(context: Context) -> int:
    found, paths = options(context, "pv", "m")
    mode = int(found.get("m", "755"), 8)
    status = 0
    for path in paths:
        process = context.process
        try:
            process.machine.files.make_dir(process.path(path), process.uid, mode=mode, parents="p" in found)
        except OSError as problem:
            await context.print(f"mkdir: cannot create directory '{path}': {problem.strerror}", err=True)
            status = 1
    return status


@program("rm", "rmdir")
async def _rm(context: Context) -> int:
    found, paths = options(context, "rRfvp")
    process, files, status = context.process, context.process.machine.files, 0
    only_dirs = context.argv[0].endswith("rmdir")
    for path in paths:
        where = process.path(path)
        try:
            node = files.find(where, process.uid, follow=False)
            if node.is_dir and not (only_dirs or "r" in found or "R" in found):
                raise OSError(21, "Is a directory", path)
            files.remove(where, process.uid, recursive=not only_dirs)
        except OSError as problem:
            if not ("f" in found and problem.errno == 2):
                await context.print(f"rm: cannot remove '{path}': {problem.strerror}", err=True)
                status = 1
    return status


@program("touch")
async def _touch(context: Context) -> int:
    process = context.process
    for path in options(context, "cm")[1]:
        where = process.path(path)
        if process.machine.files.exists(where):
            process.machine.files.find(where).mtime = process.machine.clock.now
        else:
            process.machine.files.open(where, "w", process.uid, create=True)
    return 0


def _into(context: Context, source: str, target: str) -> bytes:
    """Where `cp` and `mv` put a source: below a folder, or at the name itself."""
    where = context.process.path(target)
    files = context.process.machine.files
    if files.exists(where) and files.find(where).is_dir:
        return posixpath.join(where, os.fsencode(posixpath.basename(source.rstrip("/"))))
    return where


@program("cp")
async def _cp(context: Context) -> int:
    found, paths = options(context, "rRapfv")
    process, files = context.process, context.process.machine.files
    if len(paths) < 2:
        raise Exit(1)
    for source in paths[:-1]:
        origin, target = process.path(source), _into(context, source, paths[-1])
        node = files.find(origin, process.uid)
        if not node.is_dir:
            files.open(origin, "r", process.uid)
            files.replace(target, bytes(node.data), process.uid, mode=node.mode & 0o777)
            continue
        if not found.keys() & {"r", "R", "a"}:
            await context.print(f"cp: -r not specified; omitting directory '{source}'", err=True)
            return 1
        files.make_dir(target, process.uid, parents=True)
        for path, child in list(files.walk(origin, uid=process.uid)):
            copy = target + path[len(origin.rstrip(b"/")) :]
            if child.is_dir:
                files.make_dir(copy, process.uid, parents=True)
            elif child.is_link:
                files.symlink(copy, child.target, process.uid)
            else:
                files.replace(copy, bytes(child.data), process.uid, mode=child.mode & 0o777)
    return 0


@program("mv")
async def _mv(context: Context) -> int:
    _, paths = options(context, "fv")
    process = context.process
    for source in paths[:-1]:
        process.machine.files.move(process.path(source), _into(context, source, paths[-1]), process.uid)
    return 0 if len(paths) > 1 else 1


@program("ln")
async def _ln(context: Context) -> int:
    found, paths = options(context, "sfn")
    process, files = context.process, context.process.machine.files
    if len(paths) != 2:
        return 1
    target = _into(context, paths[0], paths[1])
    if "f" in found and files.exists(target):
        files.remove(target, process.uid)
    if "s" in found:
        files.symlink(target, os.fsencode(paths[0]), process.uid)
    else:
        files.link(process.path(paths[0]), target, process.uid)
    return 0


@program("chmod")
async def _chmod(context: Context) -> int:
    words = context.argv[1:]
    process, files = context.process, context.process.machine.files
    if len(words) < 2:
        return 1
    for path in words[1:]:
        mode = files.find(process.path(path), process.uid).mode
        files.chmod(process.path(path), _new_mode(words[0], mode & 0o7777), process.uid)
    return 0


def _new_mode(text: str, mode: int) -> int:
    if re.fullmatch(r"[0-7]+", text):
        return int(text, 8)
    for clause in text.split(","):
        match = re.fullmatch(r"([ugoa]*)([-+=])([rwx]*)", clause)
        if match is None:
            raise OSError(22, "Invalid mode", text)
        bits = sum({"r": 4, "w": 2, "x": 1}[letter] for letter in set(match[3]))
        for who in set(match[1].replace("a", "ugo") or "ugo"):
            shift = {"u": 6, "g": 3, "o": 0}[who]
            if match[2] == "=":
                mode &= ~(7 << shift)
            mode = mode & ~(bits << shift) if match[2] == "-" else mode | bits << shift
    return mode


@program("stat")
async def _stat(context: Context) -> int:
    found, paths = options(context, "L", "c")
    process = context.process
    for path in paths:
        node = process.machine.files.find(process.path(path), process.uid, follow="L" in found)
        values = {
            "%s": node.size, "%a": f"{node.mode & 0o7777:o}", "%n": path, "%u": node.uid, "%g": node.gid,
            "%Y": int(node.mtime), "%A": modes.filemode(node.mode),
        }  # fmt: skip
        form = found.get("c", "%n %s %a %u %g %Y")
        await context.print(re.sub(r"%[sanugYA]", lambda match: str(values[match[0]]), form))  # noqa: B023
    return 0


@program("basename", "dirname")
async def _name(context: Context) -> int:
    part = posixpath.basename if context.argv[0].endswith("basename") else posixpath.dirname
    await context.print(part(context.argv[1].rstrip("/")) or ".")
    return 0


@program("readlink", "realpath")
async def _readlink(context: Context) -> int:
    found, paths = options(context, "fe")
    process, files = context.process, context.process.machine.files
    for path in paths:
        if found or context.argv[0].endswith("realpath"):
            await context.print(os.fsdecode(files.real(process.path(path), process.uid)))
            continue
        node = files.find(process.path(path), process.uid, follow=False)
        if not node.is_link:
            return 1
        await context.print(os.fsdecode(node.target))
    return 0
