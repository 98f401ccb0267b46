"""The graph of what waits for what: its waves, its circles, and its picture."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Mapping, Set

Waits = Mapping[str, Set[str]]
"""For each phase, the phases that it waits for."""


def waves(waits: Waits) -> tuple[tuple[str, ...], ...]:
    """Phases that can start together, after all of the waves before; each wave in the order of the mapping."""
    sorter = graphlib.TopologicalSorter(waits)
    sorter.prepare()
    place = {name: at for at, name in enumerate(waits)}
    found = []
    while sorter.is_active():
        wave = sorter.get_ready()
        found.append(tuple(sorted(wave, key=place.__getitem__)))
        sorter.done(*wave)
    return tuple(found)


def cycles(waits: Waits) -> Iterator[tuple[str, ...]]:
    """Circles, each as `a, b, ..., a` where a waits for b; when one edge of each is cut there is none left."""
    left = {name: set(others) for name, others in waits.items()}
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
        except graphlib.CycleError as error:
            circle = _from_first(tuple(reversed(error.args[1])), list(waits))
            yield circle
            left[circle[0]].discard(circle[1])
        else:
            return


def draw(waits: Waits, told: Mapping[str, str]) -> list[str]:
    """A tree in which each phase hangs below what it waits for last; what it waits for besides is written to it."""
    order = {name: at for at, name in enumerate(name for wave in waves(waits) for name in wave)}
    parents = {name: max(others, key=order.__getitem__, default=None) for name, others in waits.items()}
    below: dict[str | None, list[str]] = {}
    for name in order:
        below.setdefault(parents[name], []).append(name)

    def text(name: str) -> str:
        others = sorted(waits[name] - {parents[name]}, key=order.__getitem__)
        return told[name] + (f", also after {' and '.join(others)}" if others else "")

    lines = []
    left = [(root, "", "") for root in reversed(below.get(None, []))]
    while left:
        name, branch, indent = left.pop()
        lines.append(branch + text(name))
        children = below.get(name, [])
        for child in reversed(children):
            is_last = child == children[-1]
            left.append((child, f"{indent}{'└─' if is_last else '├─'} ", indent + ("   " if is_last else "│  ")))
    return lines


def _from_first(circle: tuple[str, ...], order: list[str]) -> tuple[str, ...]:
    """The same circle, begun at the phase that stands first in the file."""
    ring = circle[:-1]
    start = min(range(len(ring)), key=lambda at: order.index(ring[at]))
    return (*ring[start:], *ring[:start], ring[start])
