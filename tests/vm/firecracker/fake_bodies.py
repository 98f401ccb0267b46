"""Bodies as Firecracker reads and writes them."""

from __future__ import annotations

import json
from typing import Any

from swagger import Description

_DESERIALIZING = "An error occurred when deserializing the json body of a request: "
_ORDER = ["vcpu_count", "mem_size_mib", "smt", "cpu_template", "track_dirty_pages", "huge_pages"]


class Fault(Exception):
    """A refusal; with `fatal` the process ends after it was told."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


def read_body(description: Description, method: str, path: str, text: bytes) -> Any:
    """As Rust's serde reads it, with the place in the text where it gave up."""
    try:
        body = json.loads(text)
    except ValueError:
        raise Fault(f"{_DESERIALIZING}expected value at line 1 column 1.") from None
    known, required = description.fields(method, path)
    if not known or not isinstance(body, dict):
        return body
    for name in body:
        if name not in known:
            order = _ORDER if set(_ORDER) == set(known) else known
            expected = ", ".join(f"`{each}`" for each in order)
            where = _end_of(text, json.dumps(name))
            raise Fault(f"{_DESERIALIZING}unknown field `{name}`, expected one of {expected} at line 1 column {where}.")
    for name in required:
        if name not in body:
            raise Fault(f"{_DESERIALIZING}missing field `{name}` at line 1 column {len(text)}.")
    if path == "/actions" and body["action_type"] not in ("FlushMetrics", "InstanceStart", "SendCtrlAltDel"):
        kind = body["action_type"]
        expected = "`FlushMetrics`, `InstanceStart`, `SendCtrlAltDel`"
        where = _end_of(text, json.dumps(kind))
        raise Fault(f"{_DESERIALIZING}unknown variant `{kind}`, expected one of {expected} at line 1 column {where}.")
    if path == "/vsock" and not 0 <= body["guest_cid"] < 2**32:
        cid = str(body["guest_cid"])
        column = _end_of(text, cid)
        raise Fault(f"{_DESERIALIZING}invalid value: integer `{cid}`, expected u32 at line 1 column {column}.")
    return body


def _end_of(text: bytes, part: str) -> int:
    return text.index(part.encode()) + len(part)


def full_drive(drive: dict[str, Any]) -> dict[str, Any]:
    limiter = drive.get("rate_limiter")
    if limiter is not None:
        buckets = {name: limiter.get(name) for name in ("bandwidth", "ops")}
        order = ("size", "one_time_burst", "refill_time")
        limiter = {name: bucket and {key: bucket.get(key) for key in order} for name, bucket in buckets.items()}
    held = {"cache_type": "Unsafe", "is_read_only": False, "io_engine": "Sync", **drive, "rate_limiter": limiter}
    order = ("drive_id", "partuuid", "is_root_device", "cache_type", "is_read_only", "path_on_host", "rate_limiter")
    return {name: held.get(name) for name in (*order, "io_engine", "socket")}
