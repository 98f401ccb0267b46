"""Errors as a model gets them: what happened, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping

from mcp_types import CallToolResult, TextContent

from skerry.errors import SkerryError

_RETRY = "Wait some seconds and call again."
_REPLACE = "Destroy this sandbox and create another; what was in it is lost."
_TELL = "You cannot mend this: tell the user what the message says."

ADVICE: Mapping[str, str] = {
    "error": _TELL,
    "invalid_spec": "Correct the argument that the message names and call again.",
    "invalid_fleet": "Correct the lines that the message names and call again.",
    "config_error": _TELL,
    "unsupported": "Leave out the argument that the message names, or give it another value.",
    "not_found": "Call list_sandboxes for those that exist, or create_sandbox for a new one.",
    "image_not_found": "Use an image that the host has; a person can build, import or pull one with `skerry image`.",
    "wrong_state": "Call list_sandboxes to see its state; one that is not ready cannot be used: create another.",
    "conflict": "Choose another name, or use the sandbox that has this one.",
    "limit_reached": "Destroy a sandbox that you no longer need, or ask for less, and call again.",
    "provider_error": "Call again once; if it fails again, tell the user what the message says.",
    "provider_unavailable": _TELL,
    "create_failed": "Call again once; if it fails again, ask for less or tell the user what the message says.",
    "agent_error": "Call again once; if it fails again, destroy this sandbox and create another.",
    "agent_unreachable": _REPLACE,
    "agent_protocol": _REPLACE,
    "call_timeout": "Give the command a longer timeout_s or less to do; if simple calls fail too, create another one.",
    "call_interrupted": "It is not known how much was done: look (list_directory, read_file), then call again.",
    "interpreter_not_found": "Use a language that the sandbox has, or install the interpreter with execute_command.",
    "store_error": _TELL,
    "store_unavailable": _RETRY,
    "store_full": _TELL,
    "store_read_only": _TELL,
    "store_corrupt": _TELL,
    "store_too_new": _TELL,
    "file_error": "Look at the path with list_directory and call again with another.",
    "path_not_found": "Look at its folder with list_directory; relative paths start at the home folder.",
    "path_exists": "Choose another path, or remove what is there with execute_command.",
    "path_denied": "Choose a path below the home folder or /tmp.",
    "path_invalid": "Choose a path that is a file (read, write) or a folder (list).",
    "disk_full": "Remove files with execute_command, or create a sandbox with a larger disk.",
}


def error_result(error: SkerryError) -> CallToolResult:
    """The error of a tool, for a model that reads and for a program that parses."""
    advice = ADVICE[error.code]
    told = {"code": error.code, "message": error.message, "retryable": error.retryable, "advice": advice}
    text = f"{error.code}: {error.message}\nWhat to do: {advice}"
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content={"error": told}, is_error=True
    )
