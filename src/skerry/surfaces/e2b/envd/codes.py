"""Errors of calls in Connect's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skerry import errors
from skerry.surfaces.e2b.answers import kind_of

STATUS = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "unimplemented": 501, "internal": 500, "unavailable": 503, "unauthenticated": 401,
}  # fmt: skip
"""HTTP status of each code, where an answer has one."""
_CODES: tuple[tuple[type[errors.SkerryError], str], ...] = (
    (errors.UserNotFound, "unauthenticated"),
    (errors.InvalidSpec, "invalid_argument"),
    (errors.PathNotFound, "not_found"),
    (errors.PathExists, "already_exists"),
    (errors.PathDenied, "permission_denied"),
    (errors.PathInvalid, "invalid_argument"),
    (errors.NotFound, "not_found"),
    (errors.LimitReached, "resource_exhausted"),
    (errors.Unsupported, "unimplemented"),
    (errors.CallTimeout, "deadline_exceeded"),
)
_GONE = (errors.AgentUnreachable, errors.WrongState, errors.CallInterrupted)


class RpcError(Exception):
    """A call that fails with a code of Connect's."""

    def __init__(self, code: str, message: str, kind: Mapping[str, Any] | None = None) -> None:
        """`kind` is what it says beside that, for programs that know ours."""
        super().__init__(message)
        self.code = code
        self._kind = kind or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"code": self.code, "message": errors.printable(str(self)), **self._kind}


def is_gone(error: Exception) -> bool:
    """Whether the sandbox itself is not there, for now or for good: nothing in it has answered."""
    return isinstance(error, _GONE)


def rpc_error(error: errors.SkerryError | RpcError) -> RpcError:
    """An error of ours as one of a call."""
    if isinstance(error, RpcError):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
    return RpcError(code, str(error), kind_of(error))
