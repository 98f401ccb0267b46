"""What the mock shell does itself, without a process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skerry.providers.mock import syntax
from skerry.providers.mock.context import Context
from skerry.providers.mock.handles import OpenFile
from skerry.providers.mock.kernel import Exit
from skerry.providers.mock.programs import program as programs
from skerry.providers.mock.shell import Fds, LoopControl, Return, Shell

Builtin = Callable[[Shell, list[str], Fds], Awaitable[int]]


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else 2


async def _cd(shell: Shell, argv: list[str], fds: Fds) -> int:
    target = argv[1] if len(argv) > 1 else shell.variables.get("HOME", "/")
    if target == "-":
        target = shell.variables.get("OLDPWD", ".")
    process = shell.process
    path = process.path(target)
    files = process.machine.files
    if not files.find(path, process.uid).is_dir:
        raise OSError(20, "Not a directory", target)
    shell.variables["OLDPWD"] = shell.context.cwd
    process.cwd = files.real(path, process.uid)
    shell.variables["PWD"] = shell.context.cwd
    return 0


async def _export(shell: Shell, argv: list[str], fds: Fds) -> int:
    for word in argv[1:]:
        name, equals, value = word.partition("=")
        shell.exported.add(name)
        if equals:
            shell.variables[name] = value
    return 0


async def _unset(shell: Shell, argv: list[str], fds: Fds) -> int:
    for name in argv[1:]:
        shell.variables.pop(name, None)
    return 0


async def _exit(shell: Shell, argv: list[str], fds: Fds) -> int:
    raise Exit(_number(argv[1]) if len(argv) > 1 else shell.status)


async def _return(shell: Shell, argv: list[str], fds: Fds) -> int:
    raise Return(_number(argv[1]) if len(argv) > 1 else shell.status)


async def _local(shell: Shell, argv: list[str], fds: Fds) -> int:
    """Variables of a function; here they outlive it."""
    for word in argv[1:]:
        name, _, value = word.partition("=")
        shell.variables[name] = value
    return 0


async def _set(shell: Shell, argv: list[str], fds: Fds) -> int:
    for word in argv[1:]:
        if word == "--":
            shell.arguments = argv[argv.index("--") + 1 :]
            break
        if word[0] in "-+" and "e" in word:
            shell.errexit = word[0] == "-"
    return 0


async def _shift(shell: Shell, argv: list[str], fds: Fds) -> int:
    del shell.arguments[: _number(argv[1]) if len(argv) > 1 else 1]
    return 0


async def _read(shell: Shell, argv: list[str], fds: Fds) -> int:
    names = [word for word in argv[1:] if not word.startswith("-")] or ["REPLY"]
    line, ended = await _line(shell, fds[0]) if 0 in fds else (b"", True)
    text = line.decode(errors="surrogateescape").strip()
    values = text.split(None, len(names) - 1)
    for number, name in enumerate(names):
        shell.variables[name] = values[number] if number < len(values) else ""
    return int(ended)


async def _line(shell: Shell, file: OpenFile) -> tuple[bytes, bool]:
    """A line, byte by byte, for what comes after it belongs to others; and whether the input ended in it."""
    line = b""
    while byte := await file.read(shell.process, 1):
        if byte == b"\n":
            return line, False
        line += byte
    return line, True


async def _wait(shell: Shell, argv: list[str], fds: Fds) -> int:
    wanted = set(argv[1:])
    status = 127 if wanted else 0
    for job in shell.jobs:
        if not wanted or str(job.pid) in wanted:
            code = await shell.process.wait_for(job)
            status = code if wanted else 0
    return status


async def _trap(shell: Shell, argv: list[str], fds: Fds) -> int:
    if len(argv) < 3:
        return 0
    for name in argv[2:]:
        name = "EXIT" if name == "0" else name.upper().removeprefix("SIG")
        try:
            shell.trap(name, None if argv[1] == "-" else argv[1])
        except KeyError:
            await shell.complain(f"trap: {name}: bad trap", fds)
            return 1
    return 0


async def _exec(shell: Shell, argv: list[str], fds: Fds) -> int:
    if len(argv) > 1:
        raise Exit(await shell.run_program(argv[1:], shell.env, fds, in_place=True))
    process = shell.process
    old, process.fds = process.fds, {number: file.retain() for number, file in fds.items()}
    for file in old.values():
        file.release()
    return 0


async def _eval(shell: Shell, argv: list[str], fds: Fds) -> int:
    return await shell.run(syntax.parse(" ".join(argv[1:])), fds)


async def _source(shell: Shell, argv: list[str], fds: Fds) -> int:
    text = shell.context.read_file(argv[1]).decode(errors="surrogateescape")
    return await shell.run(syntax.parse(text), fds)


async def _break(shell: Shell, argv: list[str], fds: Fds) -> int:
    raise LoopControl(stop=True)


async def _continue(shell: Shell, argv: list[str], fds: Fds) -> int:
    raise LoopControl(stop=False)


async def _command(shell: Shell, argv: list[str], fds: Fds) -> int:
    if len(argv) < 3 or argv[1] != "-v":
        return await shell.run_program(argv[1:], shell.env, fds, in_place=False) if len(argv) > 1 else 0
    process = shell.process
    context = Context(process, fds=fds)
    if argv[2] in BUILTINS:
        await context.print(argv[2])
        return 0
    try:
        process.machine.resolve([argv[2]], shell.env, process.cwd, process.uid)
    except OSError:
        return 127
    await context.print(argv[2] if "/" in argv[2] else f"/usr/bin/{argv[2]}")
    return 0


async def _program(shell: Shell, argv: list[str], fds: Fds) -> int:
    """A program that needs no process of its own."""
    context = Context(shell.process, argv=argv, env=shell.env, fds=fds)
    outcome = programs[argv[0]](context)
    code = await outcome if isinstance(outcome, Awaitable) else outcome
    return code or 0


async def _nothing(shell: Shell, argv: list[str], fds: Fds) -> int:
    return 0


BUILTINS: dict[str, Builtin] = {
    "cd": _cd, "export": _export, "unset": _unset, "exit": _exit, "set": _set, "shift": _shift, "read": _read,
    "wait": _wait, "trap": _trap, "exec": _exec, "eval": _eval, ".": _source, "source": _source, "break": _break,
    "continue": _continue, "return": _return, "local": _local, "command": _command, ":": _nothing, "umask": _nothing,
    **dict.fromkeys(("echo", "printf", "test", "[", "true", "false", "kill", "pwd"), _program),
}  # fmt: skip
