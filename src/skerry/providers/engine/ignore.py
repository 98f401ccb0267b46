"""`.dockerignore`: which files of a build context stay at home. The last pattern that fits decides."""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from skerry.errors import InvalidSpec

FILE = ".dockerignore"


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    keeps: bool


class Ignore:
    """The patterns of one file."""

    def __init__(self, text: str) -> None:
        lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines() if not line.startswith("#"))
        self._patterns = [_pattern(line) for line in lines if line]
        self.keeps_some = any(pattern.keeps for pattern in self._patterns)
        """A folder that is left out may then have files that are not."""

    def leaves_out(self, path: str) -> bool:
        """Whether a path, relative to the context, is left out: it or a folder above it fits."""
        parts = path.split("/")
        candidates = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        for pattern in reversed(self._patterns):
            if any(pattern.expression.fullmatch(candidate) for candidate in candidates):
                return not pattern.keeps
        return False


def _pattern(line: str) -> _Pattern:
    keeps = line.startswith("!")
    text = line[1:].strip() if keeps else line
    cleaned = posixpath.normpath(text).lstrip("/") or "."
    try:
        return _Pattern(re.compile(_expression(cleaned), re.DOTALL), keeps)
    except re.error as error:
        raise InvalidSpec(f"{FILE}: {line!r} is not a pattern: {error}", field="context") from None


def _expression(pattern: str) -> str:
    """The regular expression that engines make of a pattern, so that both sides leave out the same."""
    made, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if pattern.startswith("**", at - 1):
            at += 1
            at += pattern.startswith("/", at)
            made += ".*" if at >= len(pattern) else "(?:.*/)?"
        elif char == "*":
            made += "[^/]*"
        elif char == "?":
            made += "[^/]"
        elif char == "\\" and at < len(pattern):
            made += re.escape(pattern[at])
            at += 1
        elif char in "[]^-":
            made += char
        else:
            made += re.escape(char)
    return made
