"""Errors on the command line: the exit code of each, and how it is told."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import traceback
from collections.abc import Mapping

import click

from skerry.cli.output import print_json, say
from skerry.errors import SkerryError

OURS = 125
TIMED_OUT = 124
NOT_FOUND = 127
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE

# 124, 126 and 127 speak of the command, so what failed on our side is 125, also when it was a deadline of ours.
EXIT_CODES: Mapping[str, int] = {
    "error": OURS,
    "invalid_spec": OURS,
    "invalid_fleet": OURS,
    "config_error": OURS,
    "unsupported": OURS,
    "not_found": OURS,
    "image_not_found": OURS,
    "wrong_state": OURS,
    "conflict": OURS,
    "limit_reached": OURS,
    "provider_error": OURS,
    "provider_unavailable": OURS,
    "create_failed": OURS,
    "agent_error": OURS,
    "agent_unreachable": OURS,
    "agent_protocol": OURS,
    "call_timeout": OURS,
    "call_interrupted": OURS,
    "interpreter_not_found": NOT_FOUND,
    "store_error": OURS,
    "store_unavailable": OURS,
    "store_full": OURS,
    "store_read_only": OURS,
    "store_corrupt": OURS,
    "store_too_new": OURS,
    "file_error": OURS,
    "path_not_found": OURS,
    "path_exists": OURS,
    "path_denied": OURS,
    "path_invalid": OURS,
    "disk_full": OURS,
}


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell the user what went wrong and give the exit code."""
    match error:
        case SkerryError():
            _tell(error.code, error.message, as_json, retryable=error.retryable)
            return EXIT_CODES[error.code]
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return OURS
        case click.ClickException():
            usage = getattr(error, "ctx", None)
            hint = f" (see `{usage.command_path} --help`)" if usage is not None else ""
            _tell("usage", error.format_message() + hint, as_json)
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
        traceback.print_exception(error)
        hint = "please report it with the trace above"
    else:
        hint = "this is a bug; set SKERRY_DEBUG=1 to see where it happened"
    _tell("internal", f"{type(error).__name__}: {error}; {hint}", as_json)
    return OURS


def _tell(code: str, message: str, as_json: bool, *, retryable: bool = False) -> None:
    if as_json:
        print_json({"error": {"code": code, "message": message, "retryable": retryable}})
    else:
        say(message)


def _drop_stdout() -> None:
    """Whoever read our output has gone: what Python still holds for it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno() if sys.stdout else 1)
