"""Errors of the tools: for each code what a model can do about it."""

from __future__ import annotations

from collections.abc import Mapping

from mcp_types import CallToolResult, TextContent

from skerry.errors import SkerryError

_REPLACE = "Destroy this sandbox and create another; what was in it is lost."
_TELL = "You cannot mend this: tell the user what the message says."
_STORE = (
    "store_error",
    "store_full",
    "store_read_only",
    "store_corrupt",
    "store_too_new",
    "ledger_error",
    "ledger_full",
)
_NO_FILE = ("path_invalid", "path_is_folder", "path_not_folder", "path_not_file")

ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("error", "config_error", "provider_unavailable", *_STORE), _TELL),
    "invalid_spec": "Correct the argument that the message names and call again.",
    "invalid_fleet": "Correct the lines that the message names and call again.",
    "user_not_found": "Use a user that the sandbox has, or leave it out.",
    "arguments_too_long": "Write it to a file with write_file, or give it as stdin.",
    "unsupported": "Leave out the argument that the message names, or give it another value.",
    "not_found": "Call list_sandboxes for those that exist, or create_sandbox for a new one.",
    "image_not_found": "Use an image that the host has; a person can build, import or pull one with `skerry image`.",
    "wrong_state": "Call list_sandboxes to see its state; one that is not ready cannot be used: create another.",
    "conflict": "Choose another name, or use the sandbox that has this one.",
    "port_taken": "Choose another port of the host, or leave it out.",
    "limit_reached": "Destroy a sandbox that you no longer need, or ask for less, and call again.",
    "too_large": "Take a part of it: read_file with an offset, or execute_command with head, tail or grep.",
    "provider_error": "Call again once; if it fails again, tell the user what the message says.",
    "create_failed": "Call again once; if it fails again, ask for less or tell the user what the message says.",
    "agent_error": "Call again once; if it fails again, destroy this sandbox and create another.",
    "agent_unreachable": _REPLACE,
    "agent_protocol": _REPLACE,
    "sandbox_gone": "It has ended, and what was in it is lost: create another with create_sandbox.",
    "call_timeout": "Give the command a longer timeout_s or less to do; if simple calls fail too, create another one.",
    "call_interrupted": "It is not known how much was done: look (list_directory, read_file), then call again.",
    "box_full": "End processes of this sandbox with execute_command, or create one with higher limits.",
    "host_full": "Destroy sandboxes that you no longer need, then try again later.",
    "access_denied": "Tell the user that the server does not accept the token.",
    "not_permitted": "Tell the user that the token does not permit this.",
    "gate_unavailable": "Call again once; if it fails again, tell the user that the network of sandboxes is down.",
    "interpreter_died": "Its variables are gone: call execute_code again with restart, and define them anew.",
    "interpreter_killed": "Its variables are gone, perhaps for want of memory: call execute_code again with restart.",
    "interpreter_not_found": "Use a language that the sandbox has, or install the interpreter with execute_command.",
    "store_unavailable": "Wait some seconds and call again.",
    "file_error": "Look at the path with list_directory and call again with another.",
    "path_not_found": "Look at its folder with list_directory; a relative path starts where commands do.",
    "path_exists": "Choose another path, or remove what is there with execute_command.",
    **dict.fromkeys(("path_denied", "path_read_only"), "Choose a path below the home folder or /tmp."),
    **dict.fromkeys(_NO_FILE, "Choose a path that is a file (read, write) or a folder (list)."),
    "path_not_empty": "Remove what is in the folder first, with execute_command.",
    "path_too_long": "Choose a shorter name.",
    "disk_full": "Remove files with execute_command, or create a sandbox with a larger disk.",
}


def text_of(error: SkerryError) -> str:
    """An error and what to do about it, for a model."""
    return f"{error.code}: {error.message}\nWhat to do: {ADVICE[error.code]}"


def error_result(error: SkerryError) -> CallToolResult:
    """The error of a tool, for a model that reads and for a program that parses."""
    advice = ADVICE[error.code]
    told = {"code": error.code, "message": error.message, "retryable": error.retryable}
    told |= {"infrastructure": error.infrastructure, "advice": advice}
    return CallToolResult(
        content=[TextContent(type="text", text=text_of(error))], structured_content={"error": told}, is_error=True
    )
