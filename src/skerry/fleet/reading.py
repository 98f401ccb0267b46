"""Reads values from the nodes of a file; what is wrong is noted at its place, and the rest is read on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from skerry.errors import InvalidSpec
from skerry.fleet.model import Command, File, Healthcheck, meant
from skerry.fleet.tree import Entry, Items, Node, Problems, Scalar, Table
from skerry.spec import Mount, Workspace
from skerry.units import parse_duration

T = TypeVar("T")
MAX_FILE_BYTES = 16 * 2**20
NEVER = "never"


class Reading:
    """One part of the file: messages begin with `about`, and relative paths start at `folder`."""

    def __init__(self, problems: Problems, folder: Path, about: str = "") -> None:
        self._problems = problems
        self._folder = folder
        self._prefix = f"{about}: " if about else ""

    def within(self, about: str) -> Reading:
        return Reading(self._problems, self._folder, about)

    def wrong(self, node: Node, message: str) -> UnsetType:
        """Note it; the value is then as if it were not given."""
        self._problems.add(node, message, self._prefix)
        return UNSET

    def attempt(self, node: Node, make: Callable[[], T]) -> T | UnsetType:
        try:
            return make()
        except InvalidSpec as error:
            return self.wrong(node, str(error))

    def fields(self, table: Table, readers: Mapping[str, Reader], what: str = "") -> dict[str, tuple[Any, Node]]:
        """Every field that has a reader, with its node; others are noted."""
        found: dict[str, tuple[Any, Node]] = {}
        for key, node in table.entries:
            reader = readers.get(key.text)
            if reader is None:
                self.wrong(key, f"{what and what + ': '}unknown field {key.text!r}{meant(key.text, readers)}")
            elif (value := reader(self, node, key.text)) is not UNSET:
                found[key.text] = (value, node)
        return found

    def table(self, node: Node, field: str) -> Table | UnsetType:
        if isinstance(node, Table):
            return node
        if isinstance(node, Scalar) and node.value is None:
            return Table(node.line, node.column, ())
        return self.wrong(node, f"{field}: must be a table (NAME: VALUE), and is {kind_of(node)}")

    def items(self, node: Node, field: str) -> tuple[Node, ...]:
        """A list; one value alone is a list of it, and nothing is an empty one."""
        if isinstance(node, Items):
            return node.items
        if isinstance(node, Scalar):
            return () if node.value is None else (node,)
        self.wrong(node, f"{field}: must be a list, and is {kind_of(node)}")
        return ()

    def text(self, node: Node, field: str) -> str | UnsetType:
        """A text; a number will do as it is written."""
        if not isinstance(node, Scalar) or node.value is None or isinstance(node.value, bool):
            hint = "; put it in quotes" if isinstance(node, Scalar) and isinstance(node.value, bool) else ""
            return self.wrong(node, f"{field}: must be a text, and is {kind_of(node)}{hint}")
        return node.text

    def texts(self, node: Node, field: str) -> tuple[str, ...]:
        return tuple(text for each in self.items(node, field) if (text := self.text(each, field)) is not UNSET)

    def whole(self, node: Node, field: str) -> int | UnsetType:
        if isinstance(node, Scalar) and isinstance(node.value, int) and not isinstance(node.value, bool):
            return node.value
        return self.wrong(node, f"{field}: must be a whole number, and is {kind_of(node)}")

    def number(self, node: Node, field: str) -> float | UnsetType:
        """A number, also in quotes, as other tools want it."""
        value = Scalar(node.line, node.column, node.text, plain=True).value if isinstance(node, Scalar) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self.wrong(node, f"{field}: must be a number, and is {kind_of(node)}")

    def flag(self, node: Node, field: str) -> bool | UnsetType:
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        return self.wrong(node, f"{field}: must be true or false, and is {kind_of(node)}")

    def quantity(self, node: Node, field: str) -> int | float | str | UnsetType | None:
        """A size or duration as people write it; whoever takes it parses it."""
        if isinstance(node, Scalar) and node.value is not None and not isinstance(node.value, bool):
            return None if node.value == NEVER and field in ("lifetime", "idle") else node.value
        return self.wrong(node, f"{field}: must be a number or a text, and is {kind_of(node)}")

    def seconds(self, node: Node, field: str) -> float | UnsetType | None:
        value = self.quantity(node, field)
        if isinstance(value, UnsetType) or value in (None, NEVER):
            return UNSET if isinstance(value, UnsetType) else None
        return self.attempt(node, lambda: parse_duration(value, field))

    def pairs(self, node: Node, field: str) -> dict[str, str] | UnsetType:
        """A table of texts, or a list of NAME=VALUE."""
        return {name: value for name, value in self._pairs(node, field) if value is not None}

    def environment(self, node: Node, field: str) -> dict[str, str | None] | UnsetType:
        """As `pairs`; a name without a value is None: the caller's variable of that name."""
        return dict(self._pairs(node, field, bare=True))

    def _pairs(self, node: Node, field: str, *, bare: bool = False) -> Iterator[tuple[str, str | None]]:
        seen: set[str] = set()
        entries = node.entries if isinstance(node, Table) else self.items(node, field)
        for each in entries:
            pair = self._entry(each, field) if isinstance(each, Entry) else self._listed(each, field)
            if pair is None:
                continue
            place = each.value if isinstance(each, Entry) else each
            name, value = pair
            if name in seen:
                self.wrong(place, f"{field}: {name!r} is given twice")
            elif value is None and not bare:
                self.wrong(place, f"{field}: {name!r} has no value")
            else:
                seen.add(name)
                yield pair

    def _entry(self, entry: Entry, field: str) -> tuple[str, str | None] | None:
        node = entry.value
        if not isinstance(node, Scalar):
            self.wrong(node, f"{field}: {entry.key.text!r} must be a text, and is {kind_of(node)}")
            return None
        return entry.key.text, None if node.value is None else node.text

    def _listed(self, node: Node, field: str) -> tuple[str, str | None] | None:
        text = self.text(node, field)
        if isinstance(text, UnsetType):
            return None
        name, equals, value = text.partition("=")
        return name, value if equals else None

    def command(self, node: Node, field: str) -> Command | UnsetType:
        """A line for the shell, or a list of a program and its arguments."""
        return self.texts(node, field) if isinstance(node, Items) else self.text(node, field)

    def commands(self, node: Node, field: str) -> tuple[Command, ...]:
        found = (self.command(each, field) for each in self.items(node, field))
        return tuple(each for each in found if not isinstance(each, UnsetType))

    def path(self, node: Node, field: str) -> str | UnsetType:
        """A path of the host; a relative one starts at the file's folder."""
        text = self.text(node, field)
        return UNSET if isinstance(text, UnsetType) else self.resolve(text)

    def resolve(self, path: str) -> str:
        return os.path.abspath(self._folder / os.path.expanduser(path))

    def mounts(self, node: Node, field: str) -> tuple[Mount, ...]:
        found = (self._mount(each, field) for each in self.items(node, field))
        return tuple(each for each in found if not isinstance(each, UnsetType))

    def _mount(self, node: Node, field: str) -> Mount | UnsetType:
        if isinstance(node, Table):
            readers = {"source": Reading.path, "target": Reading.text, "read_only": Reading.flag}
            given = {key: value for key, (value, _) in self.fields(node, readers, field).items()}
            if missing := {"source", "target"} - {entry.key.text for entry in node.entries}:
                return self.wrong(node, f"{field}: {' and '.join(sorted(missing))} must be given")
            return self.attempt(node, lambda: Mount(**given)) if {"source", "target"} <= given.keys() else UNSET
        text = self.text(node, field)
        if isinstance(text, UnsetType):
            return UNSET
        source, colon, rest = text.partition(":")
        return self.attempt(node, lambda: Mount.parse(f"{self.resolve(source)}{colon}{rest}" if source else text))

    def workspace(self, node: Node, field: str) -> Workspace | UnsetType:
        """A folder, or a table of what a workspace has."""
        if not isinstance(node, Table):
            path = self.path(node, field)
            return UNSET if isinstance(path, UnsetType) else self.attempt(node, lambda: Workspace(path=path))
        readers = {"path": Reading.path, "copy": Reading.flag, "source": Reading.text, "commit": Reading.text}
        given = {key: value for key, (value, _) in self.fields(node, readers, field).items()}
        return self.attempt(node, lambda: Workspace(**given))

    def files(self, node: Node, field: str) -> tuple[File, ...] | UnsetType:
        """A table of paths in the member: the text itself, or a table of `text` or `from`, and `mode`."""
        table = self.table(node, field)
        if isinstance(table, UnsetType):
            return UNSET
        found = (self._file(key.text, value, f"{field}: {key.text!r}") for key, value in table.entries)
        return tuple(each for each in found if not isinstance(each, UnsetType))

    def _file(self, path: str, node: Node, what: str) -> File | UnsetType:
        if not isinstance(node, Table):
            text = self.text(node, what)
            return (
                UNSET
                if isinstance(text, UnsetType)
                else self.attempt(node, lambda: File(path=path, content=text.encode()))
            )
        readers = {"text": Reading.text, "from": Reading._content, "mode": Reading._mode}
        given = {key: value for key, (value, _) in self.fields(node, readers, what).items()}
        if len({"text", "from"} & {entry.key.text for entry in node.entries}) != 1:
            return self.wrong(node, f"{what}: give either text or from")
        content = given.get("from", given.get("text", "").encode())
        return self.attempt(node, lambda: File(path=path, content=content, mode=given.get("mode")))

    def _content(self, node: Node, field: str) -> bytes | UnsetType:
        path = self.path(node, field)
        if isinstance(path, UnsetType):
            return UNSET
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return self.wrong(node, f"files: {path} is not a file")
            with open(path, "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            return self.wrong(node, f"files: {path} cannot be read: {getattr(error, 'strerror', None) or error}")
        if len(content) > MAX_FILE_BYTES:
            return self.wrong(node, f"files: {path} is larger than {MAX_FILE_BYTES // 2**20} MiB; put it in the image")
        return content

    def _mode(self, node: Node, field: str) -> int | UnsetType:
        """In octal, as chmod takes it: 755, 0755 and 0o755 are the same."""
        digits = node.text.removeprefix("0o") if isinstance(node, Scalar) else ""
        if digits and len(digits) <= 5 and all(digit in "01234567" for digit in digits):
            return int(digits, 8)
        return self.wrong(node, f"{field}: must be a mode such as 0644, and is {kind_of(node)}")

    def healthcheck(self, node: Node, field: str) -> Healthcheck | UnsetType:
        """A command, or a table with one."""
        if not isinstance(node, Table):
            command = self.command(node, field)
            return UNSET if isinstance(command, UnsetType) else self.attempt(node, lambda: Healthcheck(command=command))
        given = {
            HEALTH_NAMES.get(key, key): value for key, (value, _) in self.fields(node, HEALTH_READERS, field).items()
        }
        if node.get("command") is None:
            return self.wrong(node, f"{field}: command must be given")
        return self.attempt(node, lambda: Healthcheck(**given)) if "command" in given else UNSET

    def delay(self, node: Node, field: str) -> float | UnsetType:
        value = self.seconds(node, field)
        return self.wrong(node, f"{field}: must be a duration, and is 'never'") if value is None else value


Reader = Callable[[Reading, Node, str], Any]

HEALTH_READERS: Mapping[str, Reader] = {
    "command": Reading.command,
    "interval": Reading.delay,
    "timeout": Reading.delay,
    "retries": Reading.whole,
    "start_period": Reading.delay,
}
HEALTH_NAMES = {"interval": "interval_s", "timeout": "timeout_s", "start_period": "start_period_s"}


def kind_of(node: Node) -> str:
    """What a node is, for people."""
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, Table):
        return "a table"
    value = node.value
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return node.text
    return repr(value) if isinstance(value, str) else node.text
