"""Redaction: commands without what looks like a secret in them, by rules that are rather too strict than too lax.

Every rule takes a time that grows with the length of the text alone: who writes the command may be hostile.
"""

from __future__ import annotations

import functools
import os.path
import re
from collections.abc import Iterable, Sequence
from typing import Any

HIDDEN = "***"
_KEPT = 2048
"""Characters of a command that are written."""
_MOST = 2 * _KEPT
"""Characters that are looked at: a secret is told by its beginning, and hidden to its end."""
_DEPTH = 3
"""Shells within shells that are looked into."""

_SECRET = (
    r"(?:pass(?:word|wd|phrase|code)?|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|"
    r"auth(?:orization)?|bearer|session|cookie|signature|pwd|otp)"
)
_NAME = rf"(?:{_SECRET}[\w.-]{{0,64}}|key)"
"""End of a name that speaks of a secret; whatever it begins with stays as it is."""
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"?|'[^']*'?"
_FLAG = rf"(?i)--?(?:(?:[\w.-]{{0,64}}?[._-])?{_SECRET}(?:[._-][\w.-]{{0,64}})?|[\w.-]{{0,64}}?-?key)"
_SHORT = frozenset({"-p", "-P", "-pw", "-a", "-w", "-k", "-K"})
"""Flags that some programs take a password by."""
_HARMLESS = frozenset({
    "awk", "bash", "cat", "chmod", "cp", "date", "df", "diff", "du", "echo", "env", "find", "git", "grep", "head", "id",
    "install", "ls", "make", "mkdir", "mv", "node", "npm", "patch", "pgrep", "pip", "pip3", "ps", "python", "python3",
    "rm", "rsync", "sed", "seq", "sh", "sort", "tail", "tar", "tee", "test", "time", "touch", "uname", "uniq", "wc",
    "xargs",
})  # fmt: skip
"""Programs that take none by these."""
_ATTACHED = r"(?:mysql|mariadb|sshpass|7z)\w*"
"""Programs that take one by a -p that it is written to."""
_USERS = frozenset({"-u", "--user", "--proxy-user"})
_NUMBERS = r"[\d.:/,-]*"
_ASSIGNMENT = r"\w+="
_TOKEN = rf"(?s)[\s;&|()<>]+|(?:{_QUOTED}|\\.|[^\s\"'\\;&|()<>])+|."
_ENDS = frozenset(";&|()\n")

_RULES = (
    (r"(?s)-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,32}PRIVATE KEY-----|\Z)", HIDDEN),
    (r"(://[^\s/:@\"']*):[^\s/\"']*(?=@)", rf"\1:{HIDDEN}"),
    # headers, to the end of their line or of the quotes around them
    (rf"(?i)({_NAME})(\s*:\s*)[^\"'\r\n]+", rf"\1\2{HIDDEN}"),
    (r"(?i)\b(bearer|basic)(\s+)[\w.~+/=-]{6,}", rf"\1\2{HIDDEN}"),
    # NAME=VALUE, --name=value, ?name=value, "name": "value"
    (rf"(?i)({_NAME}\\?[\"']?\s*[=:]\s*)(?!\s)(?:{_QUOTED}|\\.|[^\s\"'\\&;|<>])+", rf"\1{HIDDEN}"),
    # shapes of well-known tokens
    (
        r"(?<![A-Za-z0-9])(?:gh[a-z]_|github_pat_|gl[a-z]{2,5}-|sk-|[sr]k_(?:live|test)_|xox[a-z]-|xapp-|hf_|npm_|"
        r"pypi-AgE|dop_v1_|shp[a-z]{2}_|AKIA|ASIA|AIza|ya29\.|SG\.|EAA)[A-Za-z0-9_.-]{12,}",
        HIDDEN,
    ),
    (r"(?<![A-Za-z0-9])eyJ[\w-]{4,}(?:\.[\w-]*)*", HIDDEN),
)
"""Patterns, and what stands in the place of their matches."""
_SHAPES = r"eyJ|gh[a-z]_|github_pat_|gl[a-z]+-|sk-|[sr]k_|xox|xapp|hf_|npm_|pypi-|dop_|shp|AKIA|ASIA|AIza|ya29|SG\.|EAA"
_HINT = rf"pass|secret|token|key|credential|auth|bearer|basic|session|cookie|signature|pwd|otp|://|{_SHAPES.lower()}"
"""Without any of this in it no rule fits a text, in lower case: so it is found many times quicker than in any case."""
_SHORTEST = 12
"""Characters that a token of a known shape has at least."""
_PLAIN = r"[\w./+,@^~%-]*"

_re = functools.cache(re.compile)
"""A pattern, compiled when it is first used: many programs never need any."""


class Redactor:
    """Tells what is written of a command: `redacted` the whole of it but for secrets, `names` the program alone, `off`
    nothing."""

    def __init__(self, commands: str = "redacted", more: Iterable[str] = ()) -> None:
        """`more` are patterns of the user's own, whose matches are hidden too."""
        self._commands = commands
        self._more = tuple(more)

    @property
    def is_off(self) -> bool:
        return self._commands == "off"

    def command(self, command: Sequence[str] | str) -> dict[str, Any]:
        """Facts of a command: a list is argv, a string is for the shell."""
        if self._commands != "redacted":
            return {"program": "a shell" if isinstance(command, str) else os.path.basename(str(command[0]))[:_KEPT]}
        if isinstance(command, str):
            return {"shell": _cut(self._shell(command[:_MOST], _DEPTH), len(command))}
        return {"argv": self._argv(command)}

    def facts(self, value: Any) -> Any:
        """Facts with every text in them redacted."""
        if isinstance(value, str):
            return self._by_rules(value)
        if isinstance(value, dict):
            return {key: self.facts(each) for key, each in value.items()}
        return [self.facts(each) for each in value] if isinstance(value, list | tuple) else value

    def _argv(self, argv: Sequence[str]) -> list[str]:
        program = str(argv[0]).rpartition("/")[2]
        words: list[str] = []
        room, before = _KEPT, ""
        for word in map(str, argv):
            if room <= 0:
                words.append(f"... ({len(argv)} words)")
                break
            words.append(_cut(self._word(word[:_MOST], before, program, _DEPTH), len(word)))
            room -= len(words[-1]) + 1
            before = word
        return words

    def _shell(self, text: str, depth: int) -> str:
        """A line for the shell, word by word."""
        shown = []
        program, before = "", ""
        for match in _re(_TOKEN).finditer(text):
            token = match[0]
            if token[0].isspace() or token[0] in _ENDS or token[0] in "<>":
                if not _ENDS.isdisjoint(token):
                    program, before = "", ""
                shown.append(token)
                continue
            bare = token.strip("\"'")
            shown.append(self._word(token, before, program, depth, in_line=True))
            if not program and not _re(_ASSIGNMENT).match(token) and bare not in ("sudo", "exec", "env", "time"):
                program = os.path.basename(bare)
            before = bare
        return self._by_rules("".join(shown))

    def _word(self, word: str, before: str, program: str, depth: int, *, in_line: bool = False) -> str:
        """One word of a command, which may be a line for another shell; rules come later to a whole line."""
        if before.startswith("-"):
            if _re(_FLAG).fullmatch(before):
                return HIDDEN
            if before in _SHORT and program not in _HARMLESS and not _re(_NUMBERS).fullmatch(word):
                return HIDDEN
            if before in _USERS and ":" in word:
                return f"{word.partition(':')[0]}:{HIDDEN}"
        if word.startswith("-p") and len(word) > 2 and _re(_ATTACHED).fullmatch(program):
            return f"-p{HIDDEN}"
        if not self._more and _is_plain(word):
            return word
        inner = word.strip("\"'")
        if depth and (" " in inner or "\n" in inner or "\t" in inner):
            at = word.index(inner)
            return f"{word[:at]}{self._shell(inner, depth - 1)}{word[at + len(inner) :]}"
        return word if in_line else self._by_rules(word)

    def _by_rules(self, text: str) -> str:
        for pattern in self._more:
            text = _re(pattern).sub(HIDDEN, text)
        if _re(_HINT).search(text.lower()):
            for pattern, hidden in _RULES:
                text = _re(pattern).sub(hidden, text)
        return text


def _is_plain(word: str) -> bool:
    """Whether a word is no secret by itself, whatever is before it."""
    if len(word) < _SHORTEST and word.isalnum():
        return True
    return _re(_PLAIN).fullmatch(word) is not None and not _re(_SHAPES).search(word)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= _KEPT else f"{text[:_KEPT]}... ({length} characters)"
