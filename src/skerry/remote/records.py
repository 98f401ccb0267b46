"""Records of a server's registry, made of what it shows of them, and specs as it is asked for them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from skerry import clock
from skerry.clock import End
from skerry.config import Config
from skerry.model.records import Cause, Owner, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.units import parse_duration

_NOBODY = Owner(host="", pid=0, started=0)
_CLOCKS = ("lifetime", "idle", "timeout")


class View(msgspec.Struct, kw_only=True):
    """A sandbox as a server shows it."""

    id: SandboxId
    state: State
    version: int
    created_at: float
    updated_at: float
    spec: Spec
    ends_at: float | None = None
    cause: Cause | None = None
    detail: str = ""
    doomed: bool = False
    ephemeral: bool = False
    volumes: bool = False
    key: str | None = None
    enforced: dict[str, Any] = {}

    def record(self) -> Record:
        """The record of it. Its end is by this machine's clock; whoever owns it is the server's business."""
        end = None
        if self.ends_at is not None:
            end = End(clock.now(), self.ends_at - time.time())
        return Record(
            id=self.id,
            spec=self.spec,
            state=self.state,
            version=self.version,
            created_at=self.created_at,
            updated_at=self.updated_at,
            owner=_NOBODY,
            end=end,
            ephemeral=self.ephemeral,
            doomed=self.doomed,
            volumes=self.volumes,
            cause=self.cause,
            detail=self.detail,
            key=self.key,
            enforced=self.enforced,
        )


def body_of(spec: Spec, config: Config) -> dict[str, Any]:
    """The fields of a spec as a request has them. What is only this machine's default is left to the server."""
    fields: dict[str, Any] = {**msgspec.to_builtins(spec), "provider": spec.provider, "project": spec.project}
    for field in ("provider", "project"):
        if fields[field] == getattr(config, field) and is_default(config, field):
            del fields[field]
    for each in _CLOCKS:
        seconds = fields.pop(f"{each}_s", None)
        if seconds is None or (is_default(config, each) and seconds == _seconds(getattr(config, each), each)):
            continue
        fields[each] = seconds or None
    return fields


def is_default(config: Config, key: str) -> bool:
    """Whether nobody has said anything of a setting."""
    return config.origins.get(key, "default") == "default"


def _seconds(text: str, field: str) -> float:
    return 0.0 if text == "never" else parse_duration(text, field)
