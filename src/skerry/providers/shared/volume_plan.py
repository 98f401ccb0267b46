"""Volumes and mounts of a box: the data of a sandbox, the caches of its project, folders and files of the host."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import time
from collections.abc import Container, Mapping
from datetime import datetime

import msgspec

from skerry.errors import InvalidSpec
from skerry.model import caches
from skerry.model.spec import Cache, Mount, SandboxId, Spec
from skerry.providers.base import Volume
from skerry.providers.shared import layout

INSTANCE = "skerry.instance"
KIND = "skerry.volume"


class Wanted(msgspec.Struct, frozen=True):
    """A volume that a box is to have."""

    name: str
    target: str
    labels: dict[str, str]
    mode: int
    read_only: bool = False


def wanted(provider: str, id: SandboxId, spec: Spec) -> list[Wanted]:
    instance = spec.labels.get(INSTANCE, "")
    common = {"skerry": provider, "skerry.project": spec.project, INSTANCE: instance}
    found = []
    if has_data(spec):
        labels = {**common, KIND: "data", "skerry.sandbox": id, "skerry.name": spec.name or ""}
        # Named by the sandbox's name, if it has one: made again under that name, it finds its data.
        own = id if spec.name is None else f"{spec.name}-{_short(instance, spec.project, spec.name)}"
        found.append(Wanted(f"skerry-data-{own}", layout.DATA, labels, 0o755))
    for tool, path in caches.mounts(spec):
        kind = caches.kind(spec)
        labels = {**common, KIND: kind, "skerry.name": tool}
        name = f"skerry-{kind}-{tool}-{_short(instance, spec.project)}"
        found.append(Wanted(name, path, labels, 0o1777, spec.cache is Cache.READ))
    return found


def has_data(spec: Spec) -> bool:
    """Whether a box has a data volume: that has no quota, so with a limit only if it is asked for."""
    return spec.disk is None if spec.data is None else spec.data


def _short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def as_volume(
    name: str, labels: Mapping[str, str], *, in_use: bool, size: int | None, created_at: float | None
) -> Volume:
    """A volume, told by its labels."""
    return Volume(
        name=name,
        kind=labels.get(KIND, ""),
        project=labels.get("skerry.project", ""),
        sandbox=labels.get("skerry.sandbox"),
        label=labels.get("skerry.name", ""),
        instance=labels.get(INSTANCE, ""),
        size=size,
        in_use=in_use,
        created_at=created_at,
    )


OLD_S = 86400.0
"""An agent volume that is younger may be one that somebody fills, or has just found whole."""


def older_runtimes(made: Mapping[str, str], whole: Container[str]) -> list[str]:
    """Agent volumes of older versions, of all that there are with the times of their making: those from before the
    newest that is whole."""
    ages = {name: time.time() - datetime.fromisoformat(at).timestamp() for name, at in made.items() if at}
    least = min((age_s for name, age_s in ages.items() if name in whole), default=math.inf)
    return [name for name, age_s in ages.items() if age_s > max(least, OLD_S)]


def check_source(mount: Mount) -> None:
    """Raise InvalidSpec for a socket or device of the host, a way out: the engine's own socket above all."""
    try:
        mode = os.stat(mount.source).st_mode
    except OSError:
        return  # it may be there on the engine's host; if not, the engine says so
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise InvalidSpec(f"mounts: {mount.source!r} is neither a folder nor a file", field="mounts")
