"""Metrics of a server, as Prometheus reads them. No label has an id, or anything of a tenant."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from skerry.manager.admission import HostRoom
from skerry.model.records import Record
from skerry.pool.pool import PoolStats
from skerry.trace import Finished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MOST_SERIES = 5_000
"""The most combinations of labels of one metric; what is beyond them is not counted."""
_OPERATION = "skerry."
_REQUEST = "skerry.request"
Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """A value of a metric, with its labels."""

    name: str
    help: str
    labels: Mapping[str, str]
    value: float
    kind: str = "gauge"


class _Histogram:
    __slots__ = ("buckets", "count", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * len(_BOUNDS)
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        if (at := bisect_left(_BOUNDS, value)) < len(_BOUNDS):
            self.buckets[at] += 1


class Metrics:
    """Counts of a server, and what else is known of it at a moment."""

    def __init__(self) -> None:
        self.lag_s = 0.0
        """How late the event loop was when it was looked at last."""
        self.connections: Callable[[], int] = lambda: 0
        self.is_leader: Callable[[], bool] = lambda: False
        self._started_at = time.time()
        self._calls: Counter[Labels] = Counter()
        self._call_s: dict[Labels, _Histogram] = {}
        self._operations: Counter[Labels] = Counter()
        self._operation_s: dict[Labels, _Histogram] = {}
        self._refused: Counter[Labels] = Counter()
        self._in_flight = 0
        self._sources: list[Callable[[], Iterable[Sample]]] = []

    def add_source(self, source: Callable[[], Iterable[Sample]]) -> None:
        """Have samples told that somebody else knows, such as those of pools, whenever metrics are read."""
        self._sources.append(source)

    def begin(self) -> None:
        """Count a call that has begun."""
        self._in_flight += 1

    def end(self, route: str, method: str, status: int, answered_s: float | None) -> None:
        """Count a call that is over; `answered_s` is when its answer began."""
        self._in_flight -= 1
        _count(self._calls, route=route, method=method, status=str(status))
        if answered_s is not None:
            _time(self._call_s, answered_s, route=route, method=method)

    def refused(self, why: str) -> None:
        """Count a call that was refused for what the caller has done before."""
        _count(self._refused, why=why)

    def span(self, span: Finished) -> None:
        """Count a part of a call: a create, an exec, a dial."""
        if span.name.startswith(_OPERATION) and span.name != _REQUEST:
            labels = {
                "operation": span.name.removeprefix(_OPERATION),
                "provider": str(span.attributes.get("provider", "")),
            }
            _count(self._operations, **labels, outcome=span.outcome)
            _time(self._operation_s, span.duration_s, **labels)

    def text(self, live: Iterable[Record], *more: Sample) -> str:
        """All of it, and `more`, in Prometheus's text format."""
        lines: list[str] = []
        for name, help, counts in (
            ("skerry_calls_total", "Calls of the API that are over.", self._calls),
            ("skerry_operations_total", "Creates, commands, dials and calls of providers.", self._operations),
            ("skerry_refused_total", "Calls refused for their number.", self._refused),
        ):
            lines += [f"# HELP {name} {help}", f"# TYPE {name} counter"]
            lines += [f"{name}{_labels(labels)} {value}" for labels, value in counts.items()]
        lines += _histogram("skerry_call_seconds", "Seconds until the answer began.", self._call_s)
        lines += _histogram("skerry_operation_seconds", "Seconds of creates, commands, dials.", self._operation_s)
        told = set()
        for sample in (*self._gauges(live), *more, *(each for source in self._sources for each in source())):
            if sample.name not in told:
                told.add(sample.name)
                lines += [f"# HELP {sample.name} {sample.help}", f"# TYPE {sample.name} {sample.kind}"]
            lines.append(f"{sample.name}{_labels(tuple(sample.labels.items()))} {sample.value:.10g}")
        return "\n".join(lines) + "\n"

    def _gauges(self, live: Iterable[Record]) -> Iterator[Sample]:
        states = Counter((record.spec.provider, record.state.value) for record in live)
        for (provider, state), value in sorted(states.items()):
            labels = {"provider": provider, "state": state}
            yield Sample("skerry_sandboxes", "Sandboxes that have not ended.", labels, value)
        yield Sample("skerry_calls_in_flight", "Calls that are served now.", {}, self._in_flight)
        yield Sample("skerry_connections", "Connections that are open.", {}, self.connections())
        yield Sample("skerry_leader", "1 on the server that does the background work.", {}, self.is_leader())
        yield Sample("skerry_event_loop_lag_seconds", "How late the event loop is.", {}, max(0.0, self.lag_s))
        yield Sample("process_start_time_seconds", "When it was started.", {}, self._started_at)
        yield Sample("process_cpu_seconds_total", "Seconds of the processor.", {}, time.process_time(), "counter")
        yield from _of_process()


def of_host(room: HostRoom) -> Iterator[Sample]:
    """What the host has left; nothing of what it does not tell."""
    for field, help in (
        ("memory_bytes", "Memory of the host, or as much as the server may have."),
        ("memory_free_bytes", "What new processes can have without swapping."),
        ("memory_promised_bytes", "The most that the sandboxes of the host may take together."),
        ("memory_promisable_bytes", "The most that they may be promised, if that is bounded."),
        ("disk_free_bytes", "Free bytes where the state folder is."),
        ("inodes_free", "Free inodes there."),
    ):
        if (value := getattr(room, field)) is not None:
            yield Sample(f"skerry_host_{field}", help, {}, value)
    for of, pressure in (("cpu", room.cpu_pressure), ("memory", room.memory_pressure)):
        if pressure is not None:
            help = "Part of the last 10 s in which something waited for a processor, or all for memory."
            yield Sample("skerry_host_pressure_ratio", help, {"of": of}, pressure / 100)
    yield Sample("skerry_host_short", "1 while no box would be made.", {}, bool(room.short))
    yield Sample("skerry_creates_waiting", "Creates that wait for room.", {}, room.waiting)


def of_pools(pools: Iterable[PoolStats]) -> Iterator[Sample]:
    """All pools together: one alone may be a tenant's."""
    stats = list(pools)
    for field, help, kind in (
        ("size", "Sandboxes that pools are to keep warm.", "gauge"),
        ("ready", "Sandboxes that wait in pools.", "gauge"),
        ("booting", "Sandboxes that are made for pools.", "gauge"),
        ("hits", "Sandboxes taken warm from pools.", "counter"),
        ("misses", "Sandboxes asked of pools that had none.", "counter"),
        ("failures", "Boots for pools that failed.", "counter"),
    ):
        name = f"skerry_pool_{field}{'_total' if kind == 'counter' else ''}"
        yield Sample(name, help, {}, sum(getattr(each, field) for each in stats), kind)


def _of_process() -> Iterator[Sample]:
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
        files = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no such thing on macOS
        return
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    yield Sample("process_resident_memory_bytes", "Memory of the server.", {}, memory)
    yield Sample("process_open_fds", "Open files of the server.", {}, files)


def _count(counts: Counter[Labels], **labels: str) -> None:
    key = tuple(labels.items())
    if key in counts or len(counts) < _MOST_SERIES:
        counts[key] += 1


def _time(times: dict[Labels, _Histogram], seconds: float, **labels: str) -> None:
    key = tuple(labels.items())
    found = times.get(key)
    if found is None:
        if len(times) >= _MOST_SERIES:
            return
        found = times[key] = _Histogram()
    found.add(seconds)


def _histogram(name: str, help: str, times: Mapping[Labels, _Histogram]) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} histogram"
    for labels, each in times.items():
        below = 0
        for bound, value in zip(_BOUNDS, each.buckets, strict=True):
            below += value
            yield f"{name}_bucket{_labels((*labels, ('le', f'{bound:g}')))} {below}"
        yield f"{name}_bucket{_labels((*labels, ('le', '+Inf')))} {each.count}"
        yield f"{name}_sum{_labels(labels)} {each.sum:.6f}"
        yield f"{name}_count{_labels(labels)} {each.count}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
