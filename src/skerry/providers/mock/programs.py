"""The programs that every mock box has for itself, its processes and its time; each is a small function."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from skerry.providers.mock.context import Context
from skerry.providers.mock.kernel import Alarm
from skerry.providers.mock.tables import Table, options

program = Table()
USERS = {"root": 0, "user": 1000, "nobody": 65534}

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "a": "\a", "0": "\0", "e": "\x1b"}


@program("true")
def _true(context: Context) -> int:
    return 0


@program("false")
def _false(context: Context) -> int:
    return 1


@program("echo")
async def _echo(context: Context) -> int:
    words = context.argv[1:]
    ending = "\n"
    while words and words[0] in ("-n", "-e", "-ne", "-en"):
        option = words.pop(0)
        ending = "" if "n" in option else ending
        words = [_unescape(word) for word in words] if "e" in option else words
    await context.stdout.write(" ".join(words) + ending)
    return 0


def _unescape(text: str) -> str:
    octal = re.sub(r"\\0?([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
    octal = re.sub(r"\\x([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), octal)
    return re.sub(r"\\([ntr\\a0e])", lambda match: _ESCAPES[match[1]], octal)


@program("printf")
async def _printf(context: Context) -> int:
    if len(context.argv) < 2:
        return 2
    form, values = _unescape(context.argv[1]), list(context.argv[2:])
    holes = re.findall(r"%[-0-9.]*[sdxcb]", form)
    first = True
    while first or (values and holes):
        first = False

        def fill(match: re.Match[str]) -> str:
            if match[0] == "%%":
                return "%"
            value = values.pop(0) if values else ""
            kind = match[0][-1]
            if kind in "dx":
                return match[0] % int(value or 0)
            return match[0].replace("b", "s") % (_unescape(value) if kind == "b" else value)

        await context.stdout.write(re.sub(r"%%|%[-0-9.]*[sdxcb]", fill, form))
    return 0


@program("sleep")
async def _sleep(context: Context) -> int:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    total = 0.0
    for word in context.argv[1:]:
        if word == "infinity":
            total += 10**9
            continue
        match = re.fullmatch(r"(\d*\.?\d+)([smhd]?)", word)
        if match is None:
            await context.print(f"sleep: invalid time interval '{word}'", err=True)
            return 1
        total += float(match[1]) * units[match[2] or "s"]
    await context.sleep(total)
    return 0


@program("pwd")
async def _pwd(context: Context) -> None:
    await context.print(context.cwd)


@program("env", "printenv")
async def _env(context: Context) -> int:
    words = context.argv[1:]
    if context.argv[0].endswith("printenv") and words:
        await context.stdout.write("".join(f"{context.env[name]}\n" for name in words if name in context.env))
        return int(any(name not in context.env for name in words))
    env = dict(context.env)
    while words and (words[0] == "-i" or "=" in words[0]):
        word = words.pop(0)
        if word == "-i":
            env.clear()
        else:
            name, _, value = word.partition("=")
            env[name] = value
    if not words:
        await context.stdout.write("".join(f"{name}={value}\n" for name, value in env.items()))
        return 0
    process = context.process
    try:
        child = process.machine.spawn(words, env=env, cwd=process.cwd, uid=process.uid, fds=context.fds, parent=process)
    except OSError as problem:
        await context.print(f"env: {words[0]!r}: {problem.strerror}", err=True)
        return 127 if problem.errno == 2 else 126
    return await process.wait_for(child)


@program("id", "whoami")
async def _id(context: Context) -> int:
    uid = context.process.uid
    name = next((name for name, number in USERS.items() if number == uid), str(uid))
    found, _ = options(context, "ungG")
    if context.argv[0].endswith("whoami") or ("n" in found and "u" in found):
        await context.print(name)
    elif found:
        await context.print(uid)
    else:
        await context.print(f"uid={uid}({name}) gid={uid}({name}) groups={uid}({name})")
    return 0


@program("uname")
async def _uname(context: Context) -> None:
    full = "Linux skerry 6.0.0-mock #1 SMP x86_64 GNU/Linux"
    parts = {"s": "Linux", "n": "skerry", "r": "6.0.0-mock", "m": "x86_64", "a": full}
    found, _ = options(context, "asnrm")
    await context.print(*(parts[flag] for flag in found or "s"))


@program("hostname")
async def _hostname(context: Context) -> None:
    await context.print("skerry")


@program("date")
async def _date(context: Context) -> None:
    """The virtual time, in UTC."""
    from datetime import UTC, datetime

    now = datetime.fromtimestamp(context.process.machine.clock.now, UTC)
    form = next((word[1:] for word in context.argv[1:] if word.startswith("+")), "%a %b %d %H:%M:%S UTC %Y")
    form = form.replace("%s", str(int(now.timestamp()))).replace("%N", f"{now.microsecond:06}000")
    await context.print(now.strftime(form))


@program("kill")
async def _kill(context: Context) -> int:
    words = context.argv[1:]
    number = int(signal.SIGTERM)
    if words and re.match(r"-[A-Z0-9]", words[0]):
        name = words.pop(0)[1:]
        name = words.pop(0) if name == "s" and words else name
        try:
            number = int(name) if name.isdigit() else signal.Signals["SIG" + name.removeprefix("SIG")].value
        except KeyError:
            await context.print(f"kill: {name}: invalid signal", err=True)
            return 1
    status = 0
    for word in words:
        target = context.process.machine.processes.get(int(word)) if word.isdigit() else None
        if target is None:
            await context.print(f"kill: {word}: No such process", err=True)
            status = 1
        elif context.process.uid not in (0, target.uid):
            await context.print(f"kill: {word}: Operation not permitted", err=True)
            status = 1
        else:
            target.kill(number)
    return status


@program("stty")
async def _stty(context: Context) -> int:
    terminal = context.fds.get(0)
    if terminal is None or not terminal.is_terminal:
        await context.print("stty: standard input: Inappropriate ioctl for device", err=True)
        return 1
    if context.argv[1:] == ["size"]:
        await context.print(*terminal.size)
    return 0


@program("timeout")
async def _timeout(context: Context) -> int:
    if len(context.argv) < 3:
        return 125
    process = context.process
    child = process.machine.spawn(
        context.argv[2:], env=context.env, cwd=process.cwd, uid=process.uid, fds=context.fds, parent=process
    )
    seconds = float(context.argv[1].rstrip("s"))
    alarm = Alarm(process.machine, seconds, lambda: child.kill(signal.SIGTERM), pulls=True)
    status = await process.wait_for(child)
    in_time = alarm.left > 0
    alarm.cancel()
    return status if in_time else 124


@program("test", "[")
async def _test(context: Context) -> int:
    words = context.argv[1:]
    if context.argv[0] == "[" and (not words or words.pop() != "]"):
        await context.print("[: missing ]", err=True)
        return 2
    try:
        return int(not _holds(context, words))
    except ValueError as problem:
        await context.print(f"test: {problem}", err=True)
        return 2


_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__,
}  # fmt: skip


def _holds(context: Context, words: list[str]) -> bool:
    for joint in ("-o", "-a"):
        if joint in words[1:-1]:
            place = words.index(joint, 1)
            sides = _holds(context, words[:place]), _holds(context, words[place + 1 :])
            return any(sides) if joint == "-o" else all(sides)
    match words:
        case []:
            return False
        case ["!", *rest]:
            return not _holds(context, rest)
        case [word]:
            return bool(word)
        case ["-n" | "-z" as kind, word]:
            return bool(word) == (kind == "-n")
        case [kind, path] if kind.startswith("-"):
            return _file_is(context, kind, path)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, kind, right] if kind in _NUMBERS:
            return _NUMBERS[kind](int(left), int(right))
    raise ValueError("syntax error")


def _file_is(context: Context, kind: str, path: str) -> bool:
    process = context.process
    files = process.machine.files
    if kind == "-t":
        file = context.fds.get(int(path))
        return file is not None and file.is_terminal
    try:
        node = files.find(process.path(path), process.uid, follow=kind not in ("-L", "-h"))
        if kind in ("-r", "-w", "-x"):
            files.demand(node, kind[1], process.uid, b"")
    except OSError:
        return False
    kinds = {"-f": node.is_file, "-d": node.is_dir, "-L": node.is_link, "-h": node.is_link, "-s": node.size > 0}
    return kinds.get(kind, True)


@program("sh", "bash", "dash")
async def _sh(context: Context) -> int:
    from skerry.providers.mock.interactive import run_interactive
    from skerry.providers.mock.shell import Shell

    words = list(context.argv[1:])
    name = context.argv[0]
    errexit = False
    command = False
    while words and words[0].startswith("-") and len(words[0]) > 1:
        option = words.pop(0)
        command = command or (not option.startswith("--") and "c" in option)
        errexit = errexit or (not option.startswith("--") and "e" in option)
        if option == "--":
            break
    if command:
        if not words:
            await context.print(f"{name}: -c requires an argument", err=True)
            return 2
        text, arguments = words[0], words[1:]
        shell = Shell(context, arguments[0] if arguments else name, arguments[1:])
    elif words:
        try:
            text = context.read_file(words[0]).decode(errors="surrogateescape")
        except OSError as problem:
            await context.print(f"{name}: {words[0]}: {problem.strerror}", err=True)
            return 127
        shell = Shell(context, words[0], words[1:])
    else:
        shell = Shell(context, name, [])
        file = context.fds.get(0)
        if file is not None and file.is_terminal:
            return await run_interactive(shell)
        text = (await context.stdin.read_all()).decode(errors="surrogateescape")
    shell.errexit = errexit
    return await shell.run_text(text)
