"""What a word of the mock shell becomes: variables, command output, sums, field splitting, file patterns."""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import posixpath
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from skerry.providers.mock.words import Part, Word

if TYPE_CHECKING:
    from skerry.providers.mock.shell import Shell

_ESCAPES = re.compile(r"([*?\[])")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class ExpansionProblem(Exception):
    """A word has no value: a variable that must be set is not, a sum that is none."""


async def to_text(shell: Shell, word: Word) -> str:
    """The word as one text, unsplit: for assignments and redirections."""
    return "".join([_tilde(shell, number, part) or await _value(shell, part) for number, part in enumerate(word)])


async def to_pattern(shell: Shell, word: Word) -> str:
    """The word as a pattern, in which quoted text means itself."""
    return "".join([_escaped(await _value(shell, part), part.quoted) for part in word])


def matches(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern)


def _escaped(text: str, quoted: bool) -> str:
    return _ESCAPES.sub(r"[\1]", text) if quoted else text


async def to_fields(shell: Shell, word: Word) -> list[str]:
    """The words that a command gets for it: none, one or more."""
    if len(word) == 1 and word[0].kind == "name" and word[0].value == "@":
        return list(shell.arguments)
    if len(word) == 2 and word[1].value == "@" and word[1].kind == "name" and word[1].quoted and not word[0].value:
        return list(shell.arguments)
    fields: list[tuple[str, str]] = []  # as text, and as a pattern
    joined = False
    for number, part in enumerate(word):
        text = _tilde(shell, number, part) or await _value(shell, part)
        pieces = [text] if part.quoted or part.kind == "text" else _split(text)
        for index, piece in enumerate(pieces):
            if index == 0 and joined and fields:
                before = fields.pop()
                fields.append((before[0] + piece, before[1] + _escaped(piece, part.quoted)))
            else:
                fields.append((piece, _escaped(piece, part.quoted)))
        joined = bool(pieces) or joined
    found: list[str] = []
    for text, pattern in fields:
        found += _glob(shell, pattern) or [text]
    return found


def _split(text: str) -> list[str]:
    """Split at blanks; an empty end keeps the join to the next part honest."""
    pieces = text.split()
    if pieces and text[0].isspace():
        pieces.insert(0, "")
    if pieces and text[-1].isspace():
        pieces.append("")
    return pieces


def _tilde(shell: Shell, number: int, part: Part) -> str:
    if number or part.kind != "text" or part.quoted or not re.match(r"~(/|$)", part.value):
        return ""
    return shell.variables.get("HOME", "~") + part.value[1:]


def _glob(shell: Shell, pattern: str) -> list[str]:
    if not re.search(r"[*?]|\[(?![*?\[]\])", pattern):
        return []
    files, process = shell.process.machine.files, shell.process
    paths = ["/"] if pattern.startswith("/") else [""]
    for name in pattern.strip("/").split("/"):
        found = []
        for path in paths:
            try:
                entries = files.find(process.path(path or "."), process.uid).children
            except OSError:
                continue
            names = (os.fsdecode(entry) for entry in entries)
            found += [
                posixpath.join(path, entry)
                for entry in sorted(names)
                if matches(entry, name) and (name.startswith(".") or not entry.startswith("."))
            ]
        paths = found
    return paths


async def _value(shell: Shell, part: Part) -> str:
    match part.kind:
        case "text":
            return part.value
        case "command":
            return await shell.capture(part.value)
        case "sum":
            return str(_sum(shell, part.value))
    return await _variable(shell, part)


def _lookup(shell: Shell, name: str) -> str | None:
    special = {"?": str(shell.status), "$": str(shell.pid), "#": str(len(shell.arguments)), "0": shell.name}
    if name in special:
        return special[name]
    if name in ("@", "*"):
        return " ".join(shell.arguments)
    if name.isdigit():
        return shell.arguments[int(name) - 1] if int(name) <= len(shell.arguments) else None
    return shell.variables.get(name)


async def _variable(shell: Shell, part: Part) -> str:
    if len(part.value) > 1 and part.value.startswith("#"):
        return str(len(_lookup(shell, part.value[1:]) or ""))
    value = _lookup(shell, part.value)
    if part.default is None:
        return value or ""
    rule, unset = part.rule.lstrip(":"), value is None or (":" in part.rule and not value)
    if rule in ("%", "%%", "#", "##"):
        return _stripped(value or "", rule, await to_pattern(shell, part.default))
    if rule == "+":
        return "" if unset else await to_text(shell, part.default)
    if not unset:
        return value or ""
    default = await to_text(shell, part.default)
    if rule == "?":
        raise ExpansionProblem(f"{part.value}: {default or 'parameter not set'}")
    if rule == "=":
        shell.variables[part.value] = default
    return default


def _stripped(value: str, rule: str, pattern: str) -> str:
    """`value` without the shortest (or, doubled, the longest) end or beginning that the pattern matches."""
    cuts = range(len(value) + 1)
    if rule.startswith("#"):
        order = cuts if len(rule) == 1 else reversed(cuts)
        return next((value[cut:] for cut in order if matches(value[:cut], pattern)), value)
    order = reversed(cuts) if len(rule) == 1 else cuts
    return next((value[:cut] for cut in order if matches(value[cut:], pattern)), value)


def _sum(shell: Shell, text: str) -> int:
    try:
        return _compute(shell, ast.parse(text.strip().replace("$", "") or "0", mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        raise ExpansionProblem(f"arithmetic: {text.strip()!r} has no value") from None


def _compute(shell: Shell, node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(shell.variables.get(name) or 0)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_compute(shell, inner)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_compute(shell, left), _compute(shell, right))
        case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in _OPERATORS:
            return int(_OPERATORS[type(kind)](_compute(shell, left), _compute(shell, right)))
    raise ValueError(ast.dump(node))
