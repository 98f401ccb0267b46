"""Answers in E2B's form, and errors as its SDKs read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from skerry.errors import SandboxGone, SkerryError, printable
from skerry.surfaces.rest import problems

JSON = "application/json"
_AS_MISSING = frozenset({404, 410})
_encode = msgspec.json.Encoder(enc_hook=str).encode


def answer(value: Any = None, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON; None is an answer without a body."""
    if value is None:
        return Response(status_code=status, headers=headers)
    return Response(_encode(value), status, headers, JSON)


def failure(status: int, message: str, **more: Any) -> Response:
    """An error in the words of E2B: what its SDKs show is `code: message`."""
    return answer({"code": status, "message": message, **more}, status)


def kind_of(error: SkerryError) -> dict[str, Any]:
    """What an answer says of an error beside E2B's own words: SDKs pass that over."""
    code = error.refusal if isinstance(error, problems.Refused) else error.code
    return {"error_code": code, "retryable": error.retryable, "infrastructure": error.infrastructure}


def kind_headers(error: SkerryError) -> dict[str, str]:
    """The same as headers, where a body has E2B's own words and no others."""
    return {f"skerry-{name.replace('_', '-')}": str(value).lower() for name, value in kind_of(error).items()}


def of_error(error: SkerryError) -> Response:
    """The answer that tells an error. What has ended is what never was: E2B knows no difference."""
    found = problems.problem_of(error)
    status = 404 if found.status in _AS_MISSING else found.status
    headers = dict(error.headers) if isinstance(error, problems.Refused) else {}
    if status in (429, 503):
        headers.setdefault("retry-after", str(problems.RETRY_AFTER_S))
    if not found.retryable:
        headers["should-retry"] = "false"  # the SDK tries 429 and 5xx again by itself
    body = {"code": status, "message": printable(found.detail), **kind_of(error)}
    return answer(body, status, headers)


def gone(name: str) -> Response:
    """The answer for a sandbox to which nothing gets: the SDK looks for the words `was not found`."""
    message = "The sandbox was not found"
    body = {"sandboxId": name, "message": message, "code": 502, **kind_of(SandboxGone(message))}
    return answer(body, 502, {"should-retry": "false"})


def port_closed(name: str, port: int) -> Response:
    message = "The sandbox is running but port is not open"
    return answer({"sandboxId": name, "message": message, "port": port, "code": 502}, 502)
