"""Values, phases and the fleet from the fields of a file. Mistakes are noted at their places; the rest is read on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from skerry.config import variable
from skerry.errors import InvalidSpec, NotFound
from skerry.fleet import model
from skerry.fleet.model import Command, File, FleetSpec, Healthcheck, OnFailure, Phase, suggestion
from skerry.fleet.tree import Items, Node, Problems, Scalar, TableEntry, TableNode, kind_of
from skerry.model.secrets import Secret
from skerry.model.spec import Mount, Network, Spec, SpecOptions, Workspace
from skerry.units import parse_duration

T = TypeVar("T")
N = TypeVar("N")
Fields = dict[str, tuple[Any, Node]]  # values by the names of their fields, each with its place in the file
MAX_FILE_BYTES = 16 * 2**20
NEVER = "never"
DEFAULT_TIMEOUT = "default_timeout"  # the spec's `timeout`: that of a phase is for its start
INTERNAL = "internal"
_RULES = ("allow", "deny", "reach", "secrets")


class BadValue(Exception):
    """A value whose mistake is noted; the field counts as not given."""


class Placed(NamedTuple):
    """A phase, with its place and those of its fields."""

    phase: Phase
    place: Node
    fields: Fields


class Reading(NamedTuple):
    """One part of the file. What reads a value raises BadValue."""

    problems: Problems
    folder: Path  # where relative paths start
    prefix: str = ""  # of every message
    asks_providers: bool = False  # whether phases must have an image where their provider needs one
    sets: Mapping[str, Sequence[str]] | None = None  # the installation's own sets of rules; None if nobody knows
    is_foreign: bool = False  # whether it is of somebody whom nothing of this host is for

    def within(self, about: str) -> Reading:
        return self._replace(prefix=f"{about}: ")

    def wrong(self, node: Node, message: str) -> BadValue:
        """Note a mistake; the error to raise if there is no value then."""
        self.problems.add(node, message, self.prefix)
        return BadValue()

    def make(self, node: Node, make: Callable[..., T], *args: Any, **fields: Any) -> T:
        try:
            return make(*args, **_in_seconds(fields))
        except InvalidSpec as error:
            raise self.wrong(node, str(error)) from None

    def each(self, nodes: Iterable[N], read: Callable[[N], T]) -> tuple[T, ...]:
        """The values of those nodes that have one."""
        found = []
        for node in nodes:
            with suppress(BadValue):
                found.append(read(node))
        return tuple(found)

    def fields(self, table: TableNode, readers: Mapping[str, Reader], what: str = "") -> Fields:
        """Every field that has a reader, with its node; others are mistakes."""
        found: Fields = {}
        for key, node in table.entries:
            reader = readers.get(key.text)
            if reader is None:
                self.wrong(key, f"{what and what + ': '}unknown field {key.text!r}{suggestion(key.text, readers)}")
                continue
            with suppress(BadValue):
                found[key.text] = (reader(self, node, key.text), node)
        return found

    def values(self, table: TableNode, readers: Mapping[str, Reader], what: str) -> dict[str, Any]:
        return {key: value for key, (value, _) in self.fields(table, readers, what).items()}

    def table(self, node: Node, field: str) -> TableNode:
        if isinstance(node, TableNode):
            return node
        if isinstance(node, Scalar) and node.value is None:
            return TableNode(node.line, node.column, ())
        raise self.wrong(node, f"{field}: must be a table (NAME: VALUE), and is {kind_of(node)}")

    def items(self, node: Node, field: str) -> tuple[Node, ...]:
        """A list; one value alone is a list of it, and nothing is an empty one."""
        if isinstance(node, Items):
            return node.items
        if isinstance(node, Scalar):
            return () if node.value is None else (node,)
        raise self.wrong(node, f"{field}: must be a list, and is {kind_of(node)}")

    def text(self, node: Node, field: str) -> str:
        """A text; a number will do as it is written."""
        if not isinstance(node, Scalar) or node.value is None or isinstance(node.value, bool):
            hint = "; put it in quotes" if isinstance(node, Scalar) and isinstance(node.value, bool) else ""
            raise self.wrong(node, f"{field}: must be a text, and is {kind_of(node)}{hint}")
        return node.text

    def texts(self, node: Node, field: str) -> tuple[str, ...]:
        return self.each(self.items(node, field), lambda each: self.text(each, field))

    @staticmethod
    def list_of(read: Reader) -> Reader:
        return lambda self, node, field: self.each(self.items(node, field), lambda it: read(self, it, field))

    def whole(self, node: Node, field: str) -> int:
        return self._typed(node, field, "a whole number", int)

    def number(self, node: Node, field: str) -> float:
        """A number, also in quotes, as other tools want it."""
        value = Scalar(node.line, node.column, node.text, plain=True).value if isinstance(node, Scalar) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self.wrong(node, f"{field}: must be a number, and is {kind_of(node)}")

    def flag(self, node: Node, field: str) -> bool:
        return self._typed(node, field, "true or false", bool)

    def quantity(self, node: Node, field: str) -> int | float | str | None:
        """A size or duration as people write it, not yet parsed."""
        types: tuple[type[int | float | str], ...] = (int, float, str)
        value = self._typed(node, field, "a number or a text", *types)
        return None if value == NEVER and field in ("lifetime", "idle", "sleep_after", DEFAULT_TIMEOUT) else value

    def _typed(self, node: Node, field: str, what: str, *types: type[T]) -> T:
        if isinstance(node, Scalar) and type(node.value) in types:
            return cast("T", node.value)
        raise self.wrong(node, f"{field}: must be {what}, and is {kind_of(node)}")

    def seconds(self, node: Node, field: str) -> float | None:
        value = self.quantity(node, field)
        return None if value in (None, NEVER) else self.make(node, parse_duration, value, field)

    def delay(self, node: Node, field: str) -> float:
        value = self.seconds(node, field)
        if value is None:
            raise self.wrong(node, f"{field}: must be a duration, and is 'never'")
        return value

    def pairs(self, node: Node, field: str) -> dict[str, str]:
        """A table of texts, or a list of NAME=VALUE."""
        return {name: value for name, value in self._pairs(node, field) if value is not None}

    def environment(self, node: Node, field: str) -> dict[str, str | None]:
        """As `pairs`; a name without a value is None: the caller's variable of that name."""
        return dict(self._pairs(node, field, bare=not self.is_foreign))

    def _pairs(self, node: Node, field: str, *, bare: bool = False) -> Iterator[tuple[str, str | None]]:
        seen: set[str] = set()
        entries: Iterable[TableEntry | Node] = node.entries if isinstance(node, TableNode) else self.items(node, field)
        for each in entries:
            place = each.value if isinstance(each, TableEntry) else each
            with suppress(BadValue):
                name, value = self._pair(each, field)
                if name in seen:
                    raise self.wrong(place, f"{field}: {name!r} is given twice")
                if value is None and not bare:
                    raise self.wrong(place, f"{field}: {name!r} has no value")
                seen.add(name)
                yield name, value

    def _pair(self, each: TableEntry | Node, field: str) -> tuple[str, str | None]:
        if not isinstance(each, TableEntry):
            name, equals, value = self.text(each, field).partition("=")
            return name, value if equals else None
        key, node = each
        if not isinstance(node, Scalar):
            raise self.wrong(node, f"{field}: {key.text!r} must be a text, and is {kind_of(node)}")
        return key.text, None if node.value is None else node.text

    def command(self, node: Node, field: str) -> Command:
        """A line for the shell, or a list of a program and its arguments."""
        return self.texts(node, field) if isinstance(node, Items) else self.text(node, field)

    def on_failure(self, node: Node, field: str) -> OnFailure:
        text = self.text(node, field)
        if text not in list(OnFailure):
            raise self.wrong(node, f"{field}: must be {' or '.join(OnFailure)}")
        return OnFailure(text)

    def path(self, node: Node, field: str) -> str:
        """A path of the host; a relative one starts at the file's folder."""
        return self.resolve(self.text(node, field))

    def resolve(self, path: str) -> str:
        return os.path.abspath(self.folder / (path if self.is_foreign else os.path.expanduser(path)))

    def mount(self, node: Node, field: str) -> Mount:
        if isinstance(node, TableNode):
            given = self.values(node, MOUNT_FIELDS, field)
            if missing := {"source", "target"} - {entry.key.text for entry in node.entries}:
                raise self.wrong(node, f"{field}: {' and '.join(sorted(missing))} must be given")
            if not {"source", "target"} <= given.keys():
                raise BadValue
            return self.make(node, Mount, **given)
        text = self.text(node, field)
        source, colon, rest = text.partition(":")
        return self.make(node, Mount.parse, f"{self.resolve(source)}{colon}{rest}" if source else text)

    def workspace(self, node: Node, field: str) -> Workspace:
        """A folder, or a table of a workspace's fields."""
        if not isinstance(node, TableNode):
            return self.make(node, Workspace, path=self.path(node, field))
        readers = {"path": Reading.path, "copy": Reading.flag, "source": Reading.text, "commit": Reading.text}
        return self.make(node, Workspace, **self.values(node, readers, field))

    def rule(self, node: Node, field: str) -> str:
        """A rule, or the name of a set, in its one spelling."""
        from skerry.model.rules import Rules, check_texts  # most files have no rules, and are read without them

        texts = self.make(node, check_texts, (self.text(node, field),), field)
        if self.sets is not None:
            self.make(node, Rules.of, **{"allow": (), field: texts}, sets=self.sets)
        return texts[0]

    def reach(self, node: Node, field: str) -> str:
        from skerry.model.rules import Reach

        self.make(node, Reach.parse, text := self.text(node, field))
        return text

    def secrets(self, node: Node, field: str) -> dict[str, Secret]:
        """A table of secrets by name, each a table: its hosts, and where its value is found."""
        found = {}
        for key, value in self.table(node, field).entries:
            with suppress(BadValue):
                what = f"{field}: {key.text!r}"
                given = self.values(self.table(value, what), SECRET_FIELDS, what)
                found[key.text] = self.make(value, Secret, **{"hosts": (), **given})
        return found

    def files(self, node: Node, field: str) -> tuple[File, ...]:
        """A table of paths in the member: the text itself, or a table of `text` or `from`, and `mode`."""
        entries = self.table(node, field).entries
        return self.each(entries, lambda each: self._file(each.key.text, each.value, f"{field}: {each.key.text!r}"))

    def _file(self, path: str, node: Node, what: str) -> File:
        if not isinstance(node, TableNode):
            return self.make(node, File, path=path, content=self.text(node, what).encode())
        readers = {"text": Reading.text, "from": Reading._content, "mode": Reading._mode}
        given = self.values(node, readers, what)
        if len({"text", "from"} & {entry.key.text for entry in node.entries}) != 1:
            raise self.wrong(node, f"{what}: give either text or from")
        content: bytes = given.get("from", given.get("text", "").encode())
        return self.make(node, File, path=path, content=content, mode=given.get("mode"))

    def _content(self, node: Node, field: str) -> bytes:
        if self.is_foreign:
            raise self.wrong(node, "files: the files of the server's host are not for you; give text")
        path = self.path(node, field)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self.wrong(node, f"files: {path} is not a file")
            with open(path, "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise self.wrong(node, f"files: {path} cannot be read: {why}") from None
        if len(content) > MAX_FILE_BYTES:
            raise self.wrong(node, f"files: {path} is larger than {MAX_FILE_BYTES // 2**20} MiB; put it in the image")
        return content

    def _mode(self, node: Node, field: str) -> int:
        """In octal, as chmod takes it: 755, 0755 and 0o755 are the same."""
        digits = node.text.removeprefix("0o") if isinstance(node, Scalar) else ""
        if digits and len(digits) <= 5 and all(digit in "01234567" for digit in digits):
            return int(digits, 8)
        raise self.wrong(node, f"{field}: must be a mode such as 0644, and is {kind_of(node)}")

    def healthcheck(self, node: Node, field: str) -> Healthcheck:
        """A command, or a table with one."""
        if not isinstance(node, TableNode):
            return self.make(node, Healthcheck, command=self.command(node, field))
        given = self.values(node, HEALTH_READERS, field)
        if node.get("command") is None:
            raise self.wrong(node, f"{field}: command must be given")
        if "command" not in given:
            raise BadValue
        return self.make(node, Healthcheck, **given)

    def phase_fields(self, table: TableNode, base: Fields, readers: Mapping[str, Reader] | None = None) -> Fields:
        """The fields of a phase by their one name each, over those of `base`; variables and labels are joined."""
        found: Fields = {}
        for key, value in self.fields(table, readers or PHASE_FIELDS).items():
            name = ALIASES.get(key, key)
            if name in found:
                self.wrong(value[1], f"{key} and {name} are the same; give one of them")
            found[name] = value
        both = base.keys() & found.keys() & {"env", "labels"}
        joined = {key: ({**base[key][0], **found[key][0]}, found[key][1]) for key in both}
        return {**self._without_rules(base, found), **found, **joined}

    def _without_rules(self, base: Fields, found: Fields) -> Fields:
        """Those of `base` that still hold: a phase that names its network has none of the rules for another, and one
        that is internal none that lead out. What contradicts itself is noted."""
        network = found.get("network", (Network.RULES.value, None))[0]
        dropped = _RULES if network != Network.RULES else ()
        if found.get(INTERNAL, base.get(INTERNAL, (False, None)))[0]:
            dropped = ("allow", "deny", "secrets", "network")
            for key, (value, node) in found.items():
                if key in ("allow", "secrets") or (key == "network" and value not in (Network.NONE, Network.RULES)):
                    self.wrong(node, f"{key}: what is internal reaches nothing but its fleet; take one of both away")
        return {key: value for key, value in base.items() if key not in dropped}

    def build_phase(self, name: str, fields: Fields, place: Node) -> Placed | None:
        """The phase, without what is wrong in it, so that the others' mistakes can be found too."""
        nodes = {"name": place, **{key: node for key, (_, node) in fields.items()}}
        options = {key: value for key, (value, _) in fields.items() if key in SPEC_FIELDS}
        own = {key: value for key, (value, _) in fields.items() if key not in SPEC_FIELDS and key != INTERNAL}
        own = _in_seconds(own) | {"name": name}
        if DEFAULT_TIMEOUT in options:
            options["timeout"] = options.pop(DEFAULT_TIMEOUT)
        env: dict[str, str | None] = options.pop("env", {})
        inherited = tuple(sorted(key for key, value in env.items() if value is None))
        options["env"] = {key: text for key, value in env.items() if (text := _value(key, value)) is not None}
        of_spec = {**nodes, "timeout": nodes.get(DEFAULT_TIMEOUT, place)}
        spec = self._construct(Spec.of, options, of_spec, place) or Spec()
        whole = own | {"spec": spec, "inherited": inherited}
        phase = self._construct(Phase, whole, nodes, place) or self._construct(Phase, own, nodes, place)
        if self.asks_providers:
            from skerry.manager.providers import refuse_without_image
            from skerry.providers import provider_class

            with suppress(BadValue, NotFound):
                self.make(nodes.get("provider", place), refuse_without_image, provider_class(spec.provider), spec)
        return None if phase is None else Placed(phase, place, fields)

    def build_fleet(self, fields: Fields, placed: Sequence[Placed], place: Node) -> FleetSpec | None:
        """The fleet, if all is right; mistakes between the phases are noted at their places."""
        most = fields.get("max_per_phase", (model.MAX_PER_PHASE, place))[0]
        wrong = list(model.faults([each.phase for each in placed], most))
        for fault in wrong:
            at = placed[fault.position]
            node = at.fields[fault.field][1] if fault.field in at.fields else at.place
            if fault.item is not None and isinstance(node, Items):
                node = node.items[fault.item]
            elif fault.item is not None and isinstance(node, TableNode):
                node = node.entries[fault.item].key
            self.within(f"phase {fault.phase!r}").wrong(node, fault.message)
        values = _in_seconds({key: value for key, (value, _) in fields.items()})
        values["phases"] = () if wrong else tuple(each.phase for each in placed)
        return self._construct(FleetSpec, values, {key: node for key, (_, node) in fields.items()}, place)

    def _construct(
        self, make: Callable[..., T], values: dict[str, Any], nodes: Mapping[str, Node], place: Node
    ) -> T | None:
        """Make it; a field that is refused is noted and left out, and so on until no other is."""
        while True:
            try:
                return make(**values)
            except InvalidSpec as error:
                field = (error.field or "").removesuffix(_SECONDS)
                self.wrong(nodes.get(field, place), str(error))
                left_out = [key for key in (field, field + _SECONDS) if values.pop(key, None) is not None]
                if not left_out or field in _NEEDED:
                    return None


Reader = Callable[[Reading, Node, str], Any]

MOUNT_FIELDS: Mapping[str, Reader] = {"source": Reading.path, "target": Reading.text, "read_only": Reading.flag}
SECRET_FIELDS: Mapping[str, Reader] = {
    "hosts": Reading.texts,
    "env": Reading.text,
    "file": Reading.path,
    "command": Reading.texts,
    "hook": Reading.text,
}
HEALTH_READERS: Mapping[str, Reader] = {
    "command": Reading.command,
    "interval": Reading.delay,
    "timeout": Reading.delay,
    "retries": Reading.whole,
    "start_period": Reading.delay,
}
_SPEC_READERS: Mapping[str, Reader] = {
    "root": Reading.path,
    "writable_root": Reading.flag,
    "admin": Reading.flag,
    "memory": Reading.quantity,
    "cpus": Reading.number,
    "pids": Reading.whole,
    "disk": Reading.quantity,
    "egress": Reading.quantity,
    "env": Reading.environment,
    "mounts": Reading.list_of(Reading.mount),
    "workspace": Reading.workspace,
    "data": Reading.flag,
    "cache_paths": Reading.pairs,
    **dict.fromkeys(("lifetime", "idle", "sleep_after", DEFAULT_TIMEOUT), Reading.quantity),
    "labels": Reading.pairs,
    "command": Reading.command,
    "ports": Reading.texts,
    "allow": Reading.list_of(Reading.rule),
    "deny": Reading.list_of(Reading.rule),
    "reach": Reading.list_of(Reading.reach),
    "secrets": Reading.secrets,
}
"""The options of a spec that are not plain texts."""

SPEC_FIELDS = frozenset(SpecOptions.__annotations__) - {"project", "name", "timeout"} | {DEFAULT_TIMEOUT}
ALIASES = {"cpu": "cpus"}
PHASE_FIELDS: Mapping[str, Reader] = {
    "count": Reading.whole,
    "wait_for": Reading.texts,
    "on_failure": Reading.on_failure,
    "timeout": Reading.seconds,
    "max_parallel": Reading.whole,
    "setup": Reading.list_of(Reading.command),
    "files": Reading.files,
    "healthcheck": Reading.healthcheck,
    INTERNAL: Reading.flag,
    **{name: _SPEC_READERS.get(name, Reading.text) for name in sorted(SPEC_FIELDS)},
    **{alias: _SPEC_READERS[name] for alias, name in ALIASES.items()},
}
"""The fields of a phase, but for its name."""
FLEET_FIELDS: Mapping[str, Reader] = {
    "name": Reading.text,
    "project": Reading.text,
    "timeout": Reading.seconds,
    "max_parallel": Reading.whole,
    "max_per_phase": Reading.whole,
}
_NEEDED = ("name", "phases")
_DURATIONS = ("interval", "timeout", "start_period")
_SECONDS = "_s"


def _in_seconds(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names that fields have in Python, where durations are in seconds."""
    return {f"{name}{_SECONDS}" if name in _DURATIONS else name: value for name, value in values.items()}


def _value(name: str, value: str | None) -> str | None:
    return variable(name) if value is None and name and "=" not in name and "\0" not in name else value
