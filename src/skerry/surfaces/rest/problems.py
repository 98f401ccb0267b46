"""Errors as answers: each code has one status, and the body is problem+json (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from skerry.errors import SkerryError, printable

CONTENT_TYPE = "application/problem+json"
_BY_STATUS: Mapping[int, tuple[str, ...]] = {
    400: (
        "invalid_spec", "invalid_fleet", "user_not_found", "arguments_too_long", "config_error", "path_invalid",
        "path_is_folder", "path_not_folder", "path_not_empty", "path_not_file", "path_too_long",
    ),
    401: ("access_denied",),
    403: ("not_permitted", "path_denied", "path_read_only"),
    404: ("not_found", "image_not_found", "path_not_found"),
    409: ("wrong_state", "conflict", "interpreter_died", "port_taken", "path_exists"),
    410: ("sandbox_gone",),
    413: ("too_large",),
    422: ("unsupported", "interpreter_not_found", "file_error"),
    429: ("limit_reached", "box_full"),
    502: ("agent_error", "agent_protocol", "call_interrupted", "create_failed", "provider_error"),
    503: (
        "agent_unreachable", "gate_unavailable", "host_full", "interpreter_killed", "ledger_error", "ledger_full",
        "provider_unavailable",
        "store_unavailable",
    ),
    504: ("call_timeout",),
    507: ("disk_full", "store_full"),
    500: ("error", "store_error", "store_read_only", "store_corrupt", "store_too_new"),
}  # fmt: skip
STATUS: Mapping[str, int] = {code: status for status, codes in _BY_STATUS.items() for code in codes}
_TITLES = {
    400: "The request is wrong", 401: "Not signed in", 403: "Not permitted", 404: "Not found",
    405: "No such method", 406: "Not acceptable", 408: "Too slow", 409: "Conflict", 410: "Gone", 411: "No length",
    412: "Changed",
    413: "Too large", 415: "Not JSON", 416: "No such range", 421: "Wrong host", 422: "Not possible", 428: "No version",
    429: "No room", 431: "Headers too large", 500: "Failed", 501: "Not implemented", 502: "The sandbox failed",
    503: "Not available", 504: "No answer", 507: "Disk full",
}  # fmt: skip
RETRY_AFTER_S = 1


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of every answer that is no success."""

    type: str
    """A URN with the code."""
    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    """Whether the same call may succeed later."""
    infrastructure: bool = False
    """Whether the machinery failed, and neither the request nor code in a sandbox."""
    field: str | None = None
    """Path of the field of the request that is wrong."""
    request_id: str = ""


class Refused(SkerryError):
    """A call that is refused before anything of the manager is asked, such as one with a wrong content type."""

    def __init__(self, status: int, detail: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.refusal = code
        self.headers = headers or {}


def problem_of(error: SkerryError, request_id: str = "") -> Problem:
    """The answer that tells an error. Nothing of the host but what the message says is in it."""
    if isinstance(error, Refused):
        return make(error.status, error.refusal, error.message, request_id=request_id)
    field = getattr(error, "field", None)
    return make(
        STATUS[error.code],
        error.code,
        error.message,
        retryable=error.retryable,
        infrastructure=error.infrastructure,
        field=field if isinstance(field, str) else None,
        request_id=request_id,
    )


def make(status: int, code: str, detail: str, **more: Any) -> Problem:
    # messages may have several lines, such as a box's log, and are shown as text
    lines = "\n".join(printable(line) for line in detail.splitlines())
    title = _TITLES.get(status, "Failed")
    return Problem(type=f"urn:skerry:error:{code}", title=title, status=status, detail=lines, code=code, **more)
