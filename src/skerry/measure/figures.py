"""Figures: what was measured, the limit beside it, and whether a target is met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Figure(msgspec.Struct, kw_only=True, omit_defaults=True):
    case: str
    what: str
    measured: str
    """With its unit, for people."""
    limit: str = ""
    """What it is held against, with its unit."""
    value: float | None
    """What the target is about: a ratio, or the measured number itself. None if it was not run."""
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}{self.unit}"
        return f">= {self.at_least:g}{self.unit}" if self.at_least is not None else ""

    @property
    def verdict(self) -> str:
        if self.value is None or (self.at_most is None and self.at_least is None):
            return ""
        over = self.at_most is not None and self.value > self.at_most
        under = self.at_least is not None and self.value < self.at_least
        return "over" if over else "under" if under else "ok"


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def ratio(
    case: str, what: str, ours: Sequence[float], limit: Sequence[float], *, against: str, at_most: float | None = None
) -> Figure:
    """Two times, taken in turn in one loop, as the ratio of their medians."""
    return Figure(
        case=case,
        what=what,
        measured=ms(p50(ours)),
        limit=f"{ms(p50(limit))} {against}",
        value=p50(ours) / p50(limit),
        unit="x",
        at_most=at_most,
    )


def quicker(
    case: str, what: str, ours: Sequence[float], limit: Sequence[float], *, against: str, at_least: float | None = None
) -> Figure:
    """The same where we are the quicker side: how many times."""
    times = p50(limit) / p50(ours)
    figure = ratio(case, what, ours, limit, against=against)
    return msgspec.structs.replace(figure, value=times, unit="x quicker", at_least=at_least)


def not_run(case: str, what: str, reason: str) -> Figure:
    return Figure(case=case, what=what, measured=f"not run: {reason}", value=None)


def table(figures: Sequence[Figure]) -> str:
    rows = [("case", "what", "measured", "limit", "value", "target", "")]
    rows += [
        (each.case, each.what, each.measured, each.limit, _value(each), each.target, each.verdict) for each in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _value(figure: Figure) -> str:
    if figure.value is None:
        return ""
    return f"{figure.value:.2f}{figure.unit}" if figure.unit == "x" else f"{figure.value:.4g}{figure.unit}"
