"""Facts that lines tell: of specs and what changed in them, and of commands with their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from skerry.errors import SkerryError
from skerry.ledger.ledger import OFF, Ledger
from skerry.ledger.redact import Redactor
from skerry.model.records import Record
from skerry.model.results import ExecResult
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State

_CHANGE = "change"
_KINDS = {
    "paused": "pause",
    "asleep": "sleep",
    "stopped": "stop",
    "destroyed": "end",
    "doomed": "destroy",
    "adopted": "adopt",
    "acquired": "acquire",
    "renamed": "rename",
    "remaking": "rebuild",
    "creating": "rebuild",
}
"""Kinds of lines by those of the registry's events; others have the same name."""
_READY_FROM = {State.PAUSED: "resume", State.ASLEEP: "resume", State.STOPPED: "start"}
_ENDS = frozenset({"destroy", "end"})
_RULES = ("network", "allow", "deny", "reach", "secrets")
"""Fields of a spec that say what a sandbox reaches."""


def of_spec(spec: Spec, redactor: Redactor) -> dict[str, Any]:
    """A spec without values: of its environment and its secrets only the names, of its command no secret."""
    facts: dict[str, Any] = {"provider": spec.provider, **msgspec.to_builtins(spec)}
    for field in ("env", "command", "restart", "secrets"):
        facts.pop(field, None)
    if spec.env:
        facts["env"] = sorted(spec.env)
    if spec.secrets:
        facts["secrets"] = {name: list(secret.hosts) for name, secret in spec.secrets.items()}
    facts = redactor.facts(facts)
    if spec.command is not None and not redactor.is_off:
        facts["command"] = {**redactor.command(spec.command), "restart": spec.restart.value}
    return facts


def tell_before(ledger: Ledger, record: Record, event: str | None, given: Mapping[str, Any]) -> None:
    """Tell of a change in the registry before it is made: of an end, which may be told twice but never not at all, and
    of other rules, which stay as they are if it cannot be told. Raises LedgerFull or LedgerError."""
    if ledger.folder is None:
        return
    intended = msgspec.structs.replace(record, **given)
    if (kind := _kind(event, record)) in _ENDS:
        ledger.note(kind, record.id, **_of_change(kind, record, intended, ledger.redactor))
    elif _changes_rules(record.spec, intended.spec):
        ledger.append("rules", record.id, **_of_change("rules", record, intended, ledger.redactor))


def tell_after(ledger: Ledger, record: Record, event: str | None, changed: Record) -> None:
    """Tell of a change in the registry that was made, unless it was told before."""
    if ledger.folder is None:
        return
    kind = _kind(event, record)
    if kind is not None and kind not in _ENDS and not _changes_rules(record.spec, changed.spec):
        told = _of_change(kind, record, changed, ledger.redactor)
        if told or kind != _CHANGE:
            ledger.note(kind, record.id, **told)


def _kind(event: str | None, before: Record) -> str | None:
    """Kind of the line for an event of the registry; None if others have told it."""
    if event == State.CREATING and before.remaker is not None:
        return None  # it is made anew, as was told when that was begun
    if event == State.READY:
        return _READY_FROM.get(before.state, "ready")
    return _CHANGE if event is None else _KINDS.get(event, event)


def _of_change(kind: str, before: Record, after: Record, redactor: Redactor) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if after.cause is not None and kind in (*_ENDS, "lost"):
        facts["cause"] = after.cause.value
    if after.volumes and kind in _ENDS:
        facts["volumes"] = True
    if after.spec != before.spec:
        old, new = of_spec(before.spec, redactor), of_spec(after.spec, redactor)
        facts |= {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}
    if kind == "rules":
        whole = {"allow": list(after.spec.allow), "deny": list(after.spec.deny)}  # whatever of it has changed
        facts |= redactor.facts(whole)
    return facts


def _changes_rules(before: Spec, after: Spec) -> bool:
    return any(getattr(before, field) != getattr(after, field) for field in _RULES)


_TOLD = frozenset({"env", "cwd", "user", "timeout_s", "background", "tag", "language", "size"})
"""Options of a command that are told."""


class Command:
    """A command that is told in the ledger, and its end once that is known."""

    def __init__(self, ledger: Ledger, sandbox: SandboxId, seq: int | None) -> None:
        self._ledger = ledger
        self._sandbox = sandbox
        self._seq = seq
        self._began = time.monotonic()

    @classmethod
    def begin(
        cls,
        ledger: Ledger,
        sandbox: SandboxId,
        how: str,
        command: Sequence[str] | str | None,
        options: Mapping[str, Any],
        **more: Any,
    ) -> Command:
        """Tell a command before it runs; of its environment the names. Raises LedgerFull or LedgerError."""
        if ledger.folder is None or ledger.redactor.is_off:
            return cls(ledger, sandbox, None)
        facts: dict[str, Any] = {"how": how}
        if command:
            facts |= ledger.redactor.command(command)
        for name, value in (*options.items(), *more.items()):
            if name in _TOLD and value:
                facts[name] = sorted(value) if name == "env" else value
        return cls(ledger, sandbox, ledger.append("exec", sandbox, **facts))

    def end(self, result: ExecResult) -> None:
        """Tell its end, once."""
        facts: dict[str, Any] = {"exit_code": result.exit_code}
        if result.signal is not None:
            facts["signal"] = result.signal
        if result.timed_out:
            facts["timed_out"] = True
        self._tell(facts)

    def fail(self, error: BaseException) -> None:
        """Tell that its end is not known, and why, unless it is told already."""
        if isinstance(error, SkerryError):
            self._tell({"error": error.code})
        else:
            self._tell({"error": "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__})

    def leave(self) -> None:
        """Tell that nobody waits for its end any more, unless it is told already."""
        self._tell({"error": "detached"})

    def _tell(self, facts: dict[str, Any]) -> None:
        if self._seq is not None:
            duration_s = round(time.monotonic() - self._began, 6)
            self._ledger.note_soon("exit", self._sandbox, exec=self._seq, duration_s=duration_s, **facts)
            self._seq = None

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Tell whatever is raised meanwhile as its end."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


NOT_TOLD = Command(OFF, SandboxId(""), None)
"""A command that others have begun."""
