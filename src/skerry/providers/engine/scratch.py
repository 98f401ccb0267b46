"""A container that never runs: a way to read and write the files of an image or a volume."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from skerry.errors import NotFound, SkerryError
from skerry.providers.engine.api import Engine
from skerry.providers.engine.states import Listed

ABANDONED_S = 3600.0
"""Longer than anybody needs one: what is older was left by a program that died."""
_LABEL = "skerry.scratch"
_PREFIX = "skerry-scratch-"


@asynccontextmanager
async def scratch(
    engine: Engine,
    image: str,
    *,
    mounts: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AsyncIterator[str]:
    """Its name; it is gone after."""
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    body = {
        "Image": image,
        "Entrypoint": ["/never"],
        # An image made from a box would hand down the labels by which boxes are found.
        "Labels": {"skerry": "", "skerry.sandbox": "", _LABEL: engine.provider, **(labels or {})},
        "HostConfig": {"NetworkMode": "none", "Mounts": list(mounts)},
        **(config or {}),
    }
    await engine.post("/containers/create", query={"name": name}, json=body)
    try:
        yield name
    finally:
        with suppress(NotFound):
            await _remove(engine, name)


def is_abandoned(made_at: float) -> bool:
    return time.time() - made_at > ABANDONED_S


async def sweep(engine: Engine) -> None:
    """Remove those whose makers did not live to do so. A box made from a snapshot inherits the label, not the name."""
    query = {"all": True, "filters": {"label": [f"{_LABEL}={engine.provider}"]}}
    for each in await engine.get("/containers/json", list[Listed], query=query):
        is_one = any(name.removeprefix("/").startswith(_PREFIX) for name in each.names)
        if is_one and each.created is not None and is_abandoned(each.created):
            with suppress(SkerryError):  # the next one tries again
                await _remove(engine, each.id)


async def _remove(engine: Engine, container: str) -> None:
    await engine.delete(f"/containers/{container}", query={"force": True, "v": True})
