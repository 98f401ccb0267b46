"""Errors on the command line: exit codes and messages."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from skerry.cli.output import print_json, say
from skerry.errors import SkerryError

OURS = 125
TIMED_OUT = 124
NOT_FOUND = 127
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED = 130
BROKEN_PIPE = 141

# 124, 126 and 127 speak of the command, so what failed on our side is 125, also when it was a deadline of ours.
_FAILURES = (
    "error", "invalid_spec", "invalid_fleet", "user_not_found", "arguments_too_long", "config_error", "unsupported",
    "not_found", "image_not_found", "wrong_state", "conflict", "port_taken", "limit_reached", "too_large",
    "provider_error", "provider_unavailable", "create_failed", "agent_error", "agent_unreachable", "sandbox_gone",
    "agent_protocol", "call_timeout", "call_interrupted", "store_error", "store_unavailable", "store_full",
    "store_read_only", "store_corrupt", "store_too_new", "ledger_error", "ledger_full", "file_error", "path_not_found",
    "path_exists", "path_denied", "path_read_only", "path_invalid", "path_is_folder", "path_not_folder",
    "path_not_empty", "path_not_file", "path_too_long", "disk_full", "gate_unavailable",
    "host_full", "box_full", "access_denied", "not_permitted", "interpreter_died", "interpreter_killed",
)  # fmt: skip
EXIT_CODES: Mapping[str, int] = {**dict.fromkeys(_FAILURES, OURS), "interpreter_not_found": NOT_FOUND}


def report(error: BaseException, *, as_json: bool) -> int:
    """Print an error and give its exit code."""
    import asyncio

    match error:
        case SkerryError():
            _tell(error_data(error), as_json)
            return EXIT_CODES[error.code]
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return OURS
        case click.ClickException():
            usage = getattr(error, "ctx", None)
            hint = f" (see `{usage.command_path} --help`)" if usage is not None else ""
            _print("usage", error.format_message() + hint, as_json)
            return OURS
        case SystemExit():
            return error.code if isinstance(error.code, int) else OURS
        case KeyboardInterrupt() | click.Abort() | asyncio.CancelledError():
            return INTERRUPTED
        case BaseExceptionGroup():
            return report(error.exceptions[0], as_json=as_json)  # the first failed, the others with it
        case BrokenPipeError():
            _drop_stdout()
            return BROKEN_PIPE
        case OSError() if error.errno in _NO_ROOM:
            _drop_stdout()
            say(f"cannot write {error.filename or 'the output'}: {error.strerror}")
            return OURS
        case _:
            return _report_unexpected(error, as_json)


def _report_unexpected(error: BaseException, as_json: bool) -> int:
    from skerry.config import variable

    if variable("SKERRY_DEBUG"):
        import traceback

        traceback.print_exception(error)
        hint = "please report it with the trace above"
    else:
        hint = "this is a bug; set SKERRY_DEBUG=1 to see where it happened"
    _print("internal", f"{type(error).__name__}: {error}; {hint}", as_json)
    return OURS


def error_data(error: SkerryError) -> dict[str, Any]:
    """An error, for JSON."""
    return _data(error.code, error.message, error.retryable, error.infrastructure)


def _data(code: str, message: str, retryable: bool, infrastructure: bool) -> dict[str, Any]:
    return {"code": code, "message": message, "retryable": retryable, "infrastructure": infrastructure}


def _print(code: str, message: str, as_json: bool) -> None:
    _tell(_data(code, message, retryable=False, infrastructure=False), as_json)


def _tell(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"error": data})
    else:
        say(data["message"])


def _drop_stdout() -> None:
    """Send the rest of our output nowhere, as its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno() if sys.stdout else 1)
