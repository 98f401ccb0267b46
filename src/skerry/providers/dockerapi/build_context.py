"""Build context: a Dockerfile, checked before any engine reads it, and the files beside it, as one tar."""

from __future__ import annotations

import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, product
from pathlib import Path

from skerry.errors import InvalidSpec
from skerry.model.spec import Network
from skerry.oci import packing

DOCKERFILE = ".skerry.Dockerfile"
"""The name of the Dockerfile in the tar, which hides no file of the context."""
_IGNORE = ".dockerignore"

Instruction = tuple[str, str]
"""Its first word in capitals, and the rest."""
_ESCAPE = re.compile(r"(?im)^\s*#\s*escape\s*=")
_GOES_ON = re.compile(r"\\[ \t]*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_HIDDEN_FLAG = re.compile(r"^--(\S+\s+--)*\S*[\"'\\]")
_MAYBE_REMOTE = re.compile(r"://|git@|github\.com/|[$\\]")
"""With a variable or a backslash in it, it may be anything."""
_FROM_IMAGE = re.compile(r"--from=(?!\d+\s)(\S+)")


def pack(dockerfile: str, context: Path | None) -> Iterator[bytes]:
    """Pack the tar, piece by piece: the same for the same files, everything root's, links as they are."""
    patterns = ""
    if context is not None:
        with packing.reading(context):
            if not context.is_dir():
                raise InvalidSpec(f"the context {context} is not a folder", field="context")
            with suppress(FileNotFoundError):
                patterns = (context / _IGNORE).read_text(errors="replace")
            yield from _files(context, Ignore(patterns))
    # The engine takes what its own reading of the patterns leaves out away from COPY: our two files too.
    own = f"{patterns}\n{DOCKERFILE}\n" if patterns else f"{_IGNORE}\n{DOCKERFILE}\n"
    yield from packing.text_entry(_IGNORE, own.encode())
    yield from packing.text_entry(DOCKERFILE, dockerfile.encode())
    yield packing.END


def _files(context: Path, ignored: Ignore) -> Iterator[bytes]:
    """Pack the files as root's: an image is the same whoever builds it."""
    for name in wanted(context, ignored):
        path = os.path.join(context, name)
        found = os.lstat(path)
        if name == _IGNORE or stat.S_ISSOCK(found.st_mode):
            continue
        if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            raise InvalidSpec(f"{path} is a device, which no image can have; name it in {_IGNORE}", field="context")
        info = packing.describe(name, found, path)
        info.uid = info.gid = 0
        if info.type != tarfile.REGTYPE:
            yield from packing.entry(info)
            continue
        with packing.open_regular(path) as content:
            info.size = os.fstat(content.fileno()).st_size
            yield from packing.entry(info, content)


def wanted(context: Path, ignored: Ignore) -> list[str]:
    """List the paths that go along, a folder before its content."""
    kept: set[str] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(os.path.join(context, folder)) as entries:
            for each in entries:
                name = os.path.join(folder, each.name)
                out = ignored.leaves_out(name)
                if each.is_dir(follow_symlinks=False) and (not out or ignored.keeps_some):
                    folders.append(name)
                while name and not out:  # with the folders above it
                    kept.add(name)
                    name = os.path.dirname(name)
    return sorted(kept)


class Ignore:
    """The patterns of one file."""

    def __init__(self, text: str) -> None:
        lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines() if not line.startswith("#"))
        self._patterns = [_pattern(line) for line in lines if line]
        self.keeps_some = any(keeps for _, keeps in self._patterns)
        """A folder that is left out may then have files that are not."""

    def leaves_out(self, path: str) -> bool:
        """Whether a path, relative to the context, is left out: it or a folder above it fits."""
        parts = path.split("/")
        candidates = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        for expression, keeps in reversed(self._patterns):
            if any(expression.fullmatch(candidate) for candidate in candidates):
                return not keeps
        return False


def _pattern(line: str) -> tuple[re.Pattern[str], bool]:
    """The expression, and whether it keeps what fits."""
    keeps = line.startswith("!")
    text = line[1:].strip() if keeps else line
    cleaned = posixpath.normpath(text).lstrip("/") or "."
    try:
        return re.compile(_expression(cleaned), re.DOTALL), keeps
    except re.error as error:
        raise InvalidSpec(f"{_IGNORE}: {line!r} is not a pattern: {error}", field="context") from None


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


def check_dockerfile(text: str, network: Network) -> None:
    """Raise InvalidSpec for steps that the engine does with its own rights, or that choose their own walls."""
    if not text.strip():
        raise InvalidSpec("the Dockerfile is empty: it needs at least a FROM", field="dockerfile")
    if _ESCAPE.search(text):
        raise _wrong("an `escape` directive is not read: leave it out")
    for word, rest in chain.from_iterable(_readings(text)):
        if word == "ONBUILD":
            word, rest = _split(rest)
        if word == "RUN" and rest.startswith("--"):
            raise _wrong(f"RUN {rest.split()[0]} is refused: such steps choose walls and mounts of their own")
        if word != "RUN" and _HIDDEN_FLAG.search(rest):
            raise _wrong(f"{word} {rest}: write its flags without quotes and backslashes")
        if word == "ADD" and network is Network.NONE and _MAYBE_REMOTE.search(re.sub("[\"']", "", rest)):
            raise _wrong(
                f"ADD {rest} is fetched by the engine itself, and this build has no network: COPY a file, or give "
                'it a network (--network bridge, network="bridge")'
            )


def base_images(text: str, args: Mapping[str, str], target: str | None) -> list[str]:
    """Images that a build up to `target` needs. Raises InvalidSpec for a name that is not known before the build."""
    return sorted({name for reading in _readings(text) for name in _bases_of(reading, args, target)})


def _bases_of(reading: Iterable[Instruction], args: Mapping[str, str], target: str | None) -> Iterator[str]:
    values: dict[str, str] = {}
    stages: list[str] = []
    for word, rest in reading:
        if word == "ARG" and not stages:
            name, _, default = rest.partition("=")
            values[name] = args.get(name, _expanded(default.strip("'\""), values))
        elif word == "FROM":
            if target and stages and target.lower() in (stages[-1], str(len(stages) - 1)):
                break
            words = [each for each in rest.split() if not each.startswith("--")] or [""]
            name = _expanded(words[0], values)
            if name.lower() not in (*stages, "scratch"):
                yield name
            stages.append(words[2].lower() if len(words) == 3 else "")
        elif word == "COPY" and (source := _FROM_IMAGE.search(rest)) and source[1].lower() not in stages:
            yield source[1]


def _expanded(text: str, values: Mapping[str, str]) -> str:
    found = _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)
    if "$" in found:
        raise _wrong(f"FROM {text}: only $NAME and ${{NAME}} of an ARG before it are known before the build")
    return found


def _readings(text: str) -> Iterator[Iterator[Instruction]]:
    """Builders differ in what goes on over a blank line or a comment that is indented: so each of the ways."""
    for indented_comments, over_blanks in product((True, False), repeat=2):
        yield _instructions(text, indented_comments=indented_comments, over_blanks=over_blanks)


def _instructions(text: str, *, indented_comments: bool, over_blanks: bool) -> Iterator[Instruction]:
    begun = ""
    for line in text.removeprefix("\ufeff").split("\n"):
        line = line.rstrip("\r")
        is_comment = (line.lstrip() if indented_comments or not begun else line).startswith("#")
        if is_comment or (begun and over_blanks and not line.strip()):
            continue
        begun += _GOES_ON.sub("", line)
        if not _GOES_ON.search(line):
            yield _split(begun)
            begun = ""
    yield _split(begun)


def _split(line: str) -> Instruction:
    words = line.split(maxsplit=1)
    return (words[0].upper(), words[1].strip()) if len(words) == 2 else ("".join(words).upper(), "")


def _wrong(reason: str) -> InvalidSpec:
    return InvalidSpec(f"the Dockerfile cannot be built here: {reason}", field="dockerfile")
