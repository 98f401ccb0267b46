"""Records and events as rows, and back."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from skerry.clock import End, Moment
from skerry.errors import InvalidSpec, StoreCorrupt
from skerry.model.records import Cause, Event, Filter, Owner, Record
from skerry.model.spec import Spec
from skerry.model.states import State
from skerry.store.schema import LIVE

RECORD = (
    "id, spec, state, version, created_at, updated_at, owner, ephemeral, doomed, cause, detail, key, cid, "
    "enforced, boot_id, volumes, remaker, written, ends, memory"
)
HIDDEN = "***"
EVENT = "seq, time, sandbox, kind, state, cause, data"

_encoder = msgspec.json.Encoder(order="deterministic")
owner_of = msgspec.json.Decoder(Owner).decode
digests_of = msgspec.json.Decoder(dict[str, str]).decode
_plain = msgspec.json.Decoder(dict[str, Any]).decode
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "spec": lru_cache(4096)(msgspec.json.Decoder(Spec).decode),  # its checks are most of what a list costs
    "state": State,
    "owner": owner_of,
    "ephemeral": bool,
    "doomed": bool,
    "cause": Cause,
    "enforced": _plain,
    "volumes": bool,
    "remaker": owner_of,
    "written": msgspec.json.Decoder(Moment).decode,
    "ends": msgspec.json.Decoder(End).decode,
    "data": _plain,
}


def to_json(value: Any) -> str:
    """The same text for the same value, so that texts can be compared."""
    return _encoder.encode(value).decode()


def without_secrets(spec: Spec) -> Spec:
    """The spec for the registry. Values of its environment may be secret, and the agent alone needs them."""
    return msgspec.structs.replace(spec, env=dict.fromkeys(spec.env, HIDDEN)) if spec.env else spec


def fingerprint(spec: Spec, salt: str) -> str:
    """A text that tells one spec from another, and no value of its environment."""
    return to_json(msgspec.structs.replace(spec, env=digests(spec.env, salt)))


def digests(env: Mapping[str, str], salt: str) -> dict[str, str]:
    """Digests that tell each value of an environment from any other."""
    return {name: hmac.digest(salt.encode(), value.encode(), "sha256").hex() for name, value in env.items()}


def _plan(columns: str) -> list[tuple[str, Callable[[Any], Any] | None]]:
    return [(name, _DECODERS.get(name)) for name in columns.split(", ")]


_RECORD, _EVENT = _plan(RECORD), _plan(EVENT)


def _decoded(plan: Sequence[tuple[str, Callable[[Any], Any] | None]], row: Sequence[Any]) -> dict[str, Any]:
    """The values of a row by their columns; NULL is None."""
    return {
        name: value if decode is None or value is None else decode(value)
        for (name, decode), value in zip(plan, row, strict=True)
    }


def to_record(row: Sequence[Any]) -> Record:
    try:
        found = _decoded(_RECORD, row)
        return Record(end=found.pop("ends"), **found)
    except (msgspec.DecodeError, InvalidSpec, ValueError, TypeError) as error:
        raise StoreCorrupt(f"the registry's record of sandbox {row[0]} cannot be read: {error}") from error


def to_columns(record: Record) -> dict[str, Any]:
    """The columns that a change may change."""
    return {
        "version": record.version,
        "state": record.state.value,
        "project": record.spec.project,
        "provider": record.spec.provider,
        "name": record.spec.name,
        "spec": to_json(without_secrets(record.spec)),
        "owner": to_json(record.owner),
        "enforced": to_json(record.enforced),
        "cause": record.cause.value if record.cause is not None else None,
        "detail": record.detail,
        "updated_at": record.updated_at,
        "ephemeral": int(record.ephemeral),
        "doomed": int(record.doomed),
        "boot_id": record.boot_id,
        "volumes": int(record.volumes),
        "remaker": to_json(record.remaker) if record.remaker is not None else None,
        "written": to_json(record.written) if record.written is not None else None,
        "ends": to_json(record.end) if record.end is not None else None,
    }


def to_event(row: Sequence[Any]) -> Event:
    try:
        return Event(**_decoded(_EVENT, row))
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise StoreCorrupt(f"the registry's event {row[0]} cannot be read: {error}") from error


def where(filter: Filter) -> tuple[str, list[str]]:
    """A filter, but for its labels, as a condition and its parameters."""
    conditions, params = ["1 = 1"], []
    if filter.states:
        conditions.append(f"state IN ({', '.join('?' for _ in filter.states)})")
        params += [state.value for state in filter.states]
    elif not filter.include_ended:
        conditions.append(LIVE)
    for column in ("project", "provider", "name"):
        value = getattr(filter, column)
        if value is not None:
            conditions.append(f"{column} = ?")
            params.append(clean(value))
    return " AND ".join(conditions), params


def clean(text: str) -> str:
    """Text that every database can hold: boxes log what they like."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
