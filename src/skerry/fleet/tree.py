"""A YAML 1.2 file as a tree whose nodes know their places, within bounds that no fleet's file needs to exceed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from skerry.errors import ConfigError, InvalidFleet, Problem

MAX_BYTES = 512 * 1024
_MAX_NODES = 50_000  # what aliases stand for counts each time that they do
_MAX_DEPTH = 32
Event = Any  # ruamel.yaml's, whose types do not say what they have
_STR = "tag:yaml.org,2002:str"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,19}")
_BASED = re.compile(r"0o[0-7]{1,21}|0x[0-9a-fA-F]{1,16}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Scalar(msgspec.Struct, frozen=True):
    line: int
    column: int
    text: str
    plain: bool
    """Without quotes, so that it may be something other than a text."""

    @property
    def value(self) -> str | int | float | bool | None:
        """What it is by the core schema of YAML 1.2, in which `no` and `on` are texts."""
        if not self.plain:
            return self.text
        if self.text in _NULLS:
            return None
        if self.text in _BOOLS:
            return _BOOLS[self.text]
        if _INT.fullmatch(self.text):
            return int(self.text)
        if _BASED.fullmatch(self.text):
            return int(self.text, 0)
        if _FLOAT.fullmatch(self.text):
            return float(self.text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return self.text


class Items(msgspec.Struct, frozen=True):
    line: int
    column: int
    items: tuple[Node, ...]


class TableEntry(NamedTuple):
    key: Scalar
    value: Node


class TableNode(msgspec.Struct, frozen=True):
    line: int
    column: int
    entries: tuple[TableEntry, ...]

    def get(self, key: str) -> Node | None:
        return next((entry.value for entry in self.entries if entry.key.text == key), None)


Node = Scalar | Items | TableNode


def kind_of(node: Node) -> str:
    """A node's kind or value, for people."""
    if isinstance(node, Items):
        return "a list"
    if isinstance(node, TableNode):
        return "a table"
    if node.value is None:
        return "empty"
    return repr(node.value) if isinstance(node.value, str) else node.text


class Problems:
    """Mistakes of a file, collected, so that all are told at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._found: dict[tuple[int, int, str], Problem] = {}

    def add(self, place: Node, message: str, prefix: str = "") -> None:
        """Add a mistake; one that several phases share is told once."""
        problem = Problem(place.line, place.column, prefix + message)
        self._found.setdefault((place.line, place.column, message), problem)

    def end(self, line: int, column: int, message: str) -> InvalidFleet:
        """The error for a mistake after which nothing else can be read."""
        return InvalidFleet([*self._found.values(), Problem(line, column, message)], path=self.path)

    def raise_if_any(self) -> None:
        if self._found:
            raise InvalidFleet(self._found.values(), path=self.path)


def parse(text: str, problems: Problems) -> Node:
    """The one document of a file. Raises InvalidFleet if it is not YAML at all, ConfigError without a parser."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
        from ruamel.yaml.reader import ReaderError
    except ImportError as error:
        raise ConfigError(f"the Python package {error.name!r} is missing: pip install 'skerry[fleet]'") from None
    _refuse_large(len(text), problems)
    try:
        return _Builder(YAML(typ="safe", pure=True).parse(text), problems).document()
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        message = f"the character U+{ord(text[error.position]):04X} cannot be in a YAML file"
        raise problems.end(line, column, message) from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, column = (0, 0) if mark is None else (mark.line + 1, mark.column + 1)
        said = " ".join(part for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
        hint = "; indent with spaces" if "'\\t'" in said else ""
        raise problems.end(line, column, f"not YAML: {said}{hint}") from None


def read(path: Path, problems: Problems) -> str:
    """The text of a file. Raises InvalidFleet."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise problems.end(0, 0, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    _refuse_large(len(content), problems)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise problems.end(line, column, "the file is not text in UTF-8") from None


def _refuse_large(size: int, problems: Problems) -> None:
    if size > MAX_BYTES:
        raise problems.end(0, 0, f"the file is larger than {MAX_BYTES // 1024} KiB")


class _Builder:
    """Builds the tree from the events of the parser."""

    def __init__(self, found: Iterator[Event], problems: Problems) -> None:
        from ruamel.yaml import events

        self._kinds = events
        self._events = found
        self._problems = problems
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        self._count = 0

    def document(self) -> Node:
        next(self._events)
        start = next(self._events)
        if isinstance(start, self._kinds.StreamEndEvent):
            raise self._problems.end(1, 1, "the file is empty")
        if start.version not in (None, (1, 2)):
            raise self._stop(start, "the file must be YAML 1.2; take the %YAML line away")
        root = self._node(next(self._events), 0)
        next(self._events)
        after = next(self._events)
        if not isinstance(after, self._kinds.StreamEndEvent):
            raise self._stop(after, "there is a second document; a file has one")
        return root

    def _node(self, event: Event, depth: int) -> Node:
        self._charge(event, 1)
        if depth > _MAX_DEPTH:
            raise self._stop(event, f"nested deeper than {_MAX_DEPTH}")
        if isinstance(event, self._kinds.AliasEvent):
            return self._aliased(event)
        if event.tag not in (None, "!", _STR):
            self._problems.add(self._at(event), f"the tag {event.tag} means nothing here; take it away")
        before = self._count - 1
        if event.anchor:
            self._anchors[event.anchor] = None
        node = self._content(event, depth)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._count - before)
        return node

    def _content(self, event: Event, depth: int) -> Node:
        events = self._kinds
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, events.ScalarEvent):
            return Scalar(line, column, self._text(event), plain=event.style is None and event.tag is None)
        if isinstance(event, events.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self._events), events.SequenceEndEvent):
                items.append(self._node(event, depth + 1))
            return Items(line, column, tuple(items))
        pairs = []
        while not isinstance(event := next(self._events), events.MappingEndEvent):
            pairs.append((self._node(event, depth + 1), self._node(next(self._events), depth + 1)))
        return TableNode(line, column, self._entries(pairs))

    def _text(self, event: Event) -> str:
        r"""JSON writes some characters as two escapes (\ud83d\ude00), which are one here."""
        text: str = event.value
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            message = "half of a character is written as an escape; the other half is missing"
            self._problems.add(self._at(event), message)
            return ""

    def _entries(self, pairs: list[tuple[Node, Node]]) -> tuple[TableEntry, ...]:
        """Each key once; after them what `<<` brings from other tables."""
        own: dict[str, TableEntry] = {}
        merged: list[Node] = []
        for key, value in pairs:
            if not isinstance(key, Scalar):
                self._problems.add(key, "a key must be a text")
            elif key.plain and key.text == "<<":
                merged += value.items if isinstance(value, Items) else (value,)
            elif key.text in own:
                self._problems.add(key, f"{key.text!r} is given twice, first in line {own[key.text].key.line}")
            else:
                own[key.text] = TableEntry(key, value)
        for table in merged:
            if isinstance(table, TableNode):
                own = {entry.key.text: entry for entry in table.entries} | own
            else:
                self._problems.add(table, "<< must name a table, or a list of tables")
        return tuple(own.values())

    def _aliased(self, event: Event) -> Node:
        if event.anchor not in self._anchors:
            raise self._stop(event, f"*{event.anchor} names no anchor before it")
        if (found := self._anchors[event.anchor]) is None:
            raise self._stop(event, f"*{event.anchor} is inside of what it names")
        node, count = found
        self._charge(event, count)
        return node

    def _charge(self, event: Event, count: int) -> None:
        self._count += count
        if self._count > _MAX_NODES:
            raise self._stop(event, f"more than {_MAX_NODES} values, with what aliases stand for")

    def _at(self, event: Event) -> Scalar:
        return Scalar(event.start_mark.line + 1, event.start_mark.column + 1, "", plain=True)

    def _stop(self, event: Event, message: str) -> InvalidFleet:
        return self._problems.end(event.start_mark.line + 1, event.start_mark.column + 1, message)
