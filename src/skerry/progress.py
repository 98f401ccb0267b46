"""How far something long has come, told to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """One step of it; `done` and `total` are bytes or parts, where they are known."""

    message: str
    done: int | None = None
    total: int | None = None


OnProgress = Callable[[Progress], None]
