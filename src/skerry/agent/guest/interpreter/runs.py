"""Runs of a context, and the pipes that take what is written meanwhile."""

from __future__ import annotations

import json
import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CHUNK = 1 << 16
_MAX_DISPLAYED = 48 << 20
"""Bytes of all that a run may show, beside its output."""


class Run:
    """A request to run code, from its arrival to its end."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = str(request["id"])
        self.client = request.get("client")
        self.code = str(request["code"])
        self.added: dict[str, str] = request.get("added") or {}
        """Variables that are set from now on."""
        self.env: dict[str, str] = request.get("env") or {}
        """Variables that are set meanwhile."""
        timeout_s = request.get("timeout_s")
        self.timeout_s = float(timeout_s) if timeout_s else None
        limit = int(request.get("limit") or 1 << 24)
        self.left = {"stdout": limit, "stderr": limit}
        self.displayed_left = _MAX_DISPLAYED
        self.truncated = False
        self.has_started = False
        self.is_interrupted = False
        self.timed_out = False
        self.number = 0
        self.next_blow: float | None = None
        self.blows = 0


class Output:
    """A pipe that takes what the kernel and its children write to a descriptor."""

    def __init__(self, name: str) -> None:
        import codecs

        self.name = name
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str | None:
        """What there is, at most one chunk; None if there is nothing."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        return self._decoder.decode(data) if data else None


def take_lines(buffer: bytearray) -> Iterator[bytes]:
    """Take whole lines out of a buffer."""
    end = buffer.rfind(b"\n")
    if end < 0:
        return
    whole = bytes(buffer[:end])
    del buffer[: end + 1]
    yield from filter(None, whole.split(b"\n"))


def count_ooms() -> int:
    """How often the kernel has killed something of the box for want of memory, as far as it tells."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0


def to_json(value: object) -> str:
    """JSON as everybody reads it, which has no NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), ensure_ascii=False)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
