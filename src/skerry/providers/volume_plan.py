"""Which volumes a box is to have, and under which names: the data of a sandbox, and the caches of its project."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from skerry import caches
from skerry.providers import layout
from skerry.providers.base import Volume
from skerry.spec import Cache, SandboxId, Spec

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
        found.append(Wanted(_data_name(id, spec, instance), layout.DATA, labels, 0o755))
    for tool, path in caches.mounts(spec):
        labels = {**common, KIND: "cache", "skerry.name": tool}
        name = f"skerry-cache-{tool}-{_short(instance, spec.project)}"
        found.append(Wanted(name, path, labels, 0o1777, spec.cache is Cache.READ))
    return found


def has_data(spec: Spec) -> bool:
    """A volume has no quota, so one that was not asked for is not there where a limit was."""
    return spec.disk is None if spec.data is None else spec.data


def _data_name(id: SandboxId, spec: Spec, instance: str) -> str:
    """By the sandbox's name, if it has one: made again under that name, it finds its data."""
    if spec.name is None:
        return f"skerry-data-{id}"
    return f"skerry-data-{spec.name}-{_short(instance, spec.project, spec.name)}"


def _short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def as_volume(
    name: str, labels: Mapping[str, str], *, in_use: bool, size: int | None, created_at: float | None
) -> Volume:
    """What a volume is, told by its labels."""
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
