"""Sizes and durations as people write them: `512M`, `1.5G`, `90s`, `2h`."""

from __future__ import annotations

import math
import re

from skerry.errors import InvalidSpec

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")
_SIZES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(value: int | str, field: str) -> int:
    """Bytes from `536870912`, `"512M"`, `"512MiB"` or `"0.5G"` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower().removesuffix("ib").removesuffix("b") if match else ""
    if match is None or unit not in _SIZES or not math.isfinite(float(match[1]) * _SIZES[unit]):
        shown = value if not isinstance(value, str) else value[:100]
        raise InvalidSpec(f"{field}: {shown!r} is not a size; write bytes or e.g. 512M, 2G", field=field)
    return int(float(match[1]) * _SIZES[unit])


def parse_duration(value: float | str, field: str) -> float:
    """Seconds from `90`, `"90s"`, `"1.5h"`, `"250ms"` or `"1d"`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _SECONDS:
        raise InvalidSpec(f"{field}: {value!r} is not a duration; write seconds or e.g. 90s, 10m, 2h", field=field)
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_size(count: float) -> str:
    """A size for people: `1.5G`, `512M`, `12B`."""
    for unit in ("B", "K", "M", "G"):
        if abs(count) < 1024:
            return f"{count:.0f}{unit}" if unit == "B" or count == int(count) else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}T"


def format_duration(seconds: float) -> str:
    """A duration for people, in its two largest units: `6h 59m`, `2m 5s`, `0.5s`."""
    if seconds < 1:
        return f"{max(0.0, seconds):g}s"
    counts: list[tuple[int, str]] = []
    rest = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in counts[:2] if count)
