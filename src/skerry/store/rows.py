"""How records and events become rows, and rows become records and events."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, StoreCorrupt
from skerry.lifecycle import State
from skerry.records import Cause, Event, Filter, Owner, Record
from skerry.spec import SandboxId, Spec
from skerry.store.schema import LIVE

RECORD = (
    "id, spec, state, version, created_at, updated_at, owner, ephemeral, doomed, cause, detail, key, cid, "
    "enforced, boot_id, volumes, remaker"
)
HIDDEN = "***"
EVENT = "seq, time, sandbox, kind, state, cause, data"

_encoder = msgspec.json.Encoder(order="deterministic")
_spec = msgspec.json.Decoder(Spec)
_owner = msgspec.json.Decoder(Owner)
_plain = msgspec.json.Decoder(dict[str, Any])


def to_json(value: Any) -> str:
    """The same text for the same value, so that texts can be compared."""
    return _encoder.encode(value).decode()


def without_secrets(spec: Spec) -> Spec:
    """A spec for the registry. What is in its environment may be secret, and the agent alone needs it."""
    return msgspec.structs.replace(spec, env=dict.fromkeys(spec.env, HIDDEN))


def fingerprint(spec: Spec, salt: str) -> str:
    """Tells one spec from another without telling what is in its environment."""
    env = {name: hmac.digest(salt.encode(), value.encode(), "sha256").hex() for name, value in spec.env.items()}
    return to_json(msgspec.structs.replace(spec, env=env))


def owner_of(text: str) -> Owner:
    return _owner.decode(text)


def to_record(row: Sequence[Any]) -> Record:
    id, spec, state, version, created, updated, owner, ephemeral, doomed, cause, detail, key, cid, *rest = row
    enforced, boot, volumes, remaker = rest
    try:
        return Record(
            id=id,
            spec=_spec.decode(spec),
            state=State(state),
            version=version,
            created_at=created,
            updated_at=updated,
            owner=_owner.decode(owner),
            ephemeral=bool(ephemeral),
            doomed=bool(doomed),
            cause=Cause(cause) if cause is not None else None,
            detail=detail,
            key=key,
            cid=cid,
            enforced=_plain.decode(enforced),
            boot_id=boot,
            volumes=bool(volumes),
            remaker=_owner.decode(remaker) if remaker is not None else None,
        )
    except (msgspec.DecodeError, InvalidSpec, ValueError, TypeError) as error:
        raise StoreCorrupt(f"the registry's record of sandbox {id} cannot be read: {error}") from error


def to_columns(record: Record) -> dict[str, Any]:
    """What a change may change."""
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
    }


def to_event(row: Sequence[Any]) -> Event:
    seq, time, sandbox, kind, state, cause, data = row
    try:
        return Event(
            seq=seq,
            time=time,
            sandbox=SandboxId(sandbox),
            kind=kind,
            state=State(state),
            cause=Cause(cause) if cause is not None else None,
            data=_plain.decode(data),
        )
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise StoreCorrupt(f"the registry's event {seq} cannot be read: {error}") from error


def where(filter: Filter) -> tuple[str, list[str]]:
    """All of a filter but its labels, as a condition and its parameters."""
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
