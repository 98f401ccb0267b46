"""What generated calls are told of the installation that they are made on: names that are there, and ends of waits.

`SCHEMATHESIS_HOOKS` names this file to the run of test_schemathesis, which makes what is named here.
"""

from __future__ import annotations

from typing import Any

import schemathesis

from skerry.model.states import State

BOX, STILL, GONE = "box", "still", "gone"
"""Sandboxes: one that is used, one that is stopped and paused, and one that is destroyed."""
POOL, FLEET = "pool", "crew"
_CHANGES = ("stop", "start", "pause", "resume", "restore")
_MOST_S = 0.2
_WAITS = ("timeout_s", "wait_s", "grace_s")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Have every second call made on what is there, and let none last."""
    _bound(case.query)
    _bound(case.body)
    parameters = case.path_parameters
    if isinstance(parameters, dict):
        if case.path.startswith("/v1/tokens/"):  # the run's own may be in a list that it has read
            parameters["id"] = "none"
        elif len(case.as_curl_command()) % 2:
            _name(case.path, case.method.upper(), parameters)
    if case.path.endswith("/wait") and isinstance(case.body, dict):  # for any state: else its end is a 504
        case.body |= {"states": [str(state) for state in State], "timeout_s": 5}
    elif case.path.endswith("/wait"):  # without a body it would be for a minute
        parameters["id"] = "none"
    if "/files" in case.path and isinstance(case.query, dict) and "path64" not in case.query:
        case.query["path"] = "a"


def _name(path: str, method: str, parameters: dict[str, Any]) -> None:
    if path == "/v1/sandboxes/{id}" and method == "DELETE":
        parameters["id"] = GONE
    elif path.startswith("/v1/sandboxes/{id}"):
        parameters["id"] = STILL if path.rpartition("/")[2] in _CHANGES else BOX
    elif path.startswith("/v1/pools/") and method != "DELETE":
        parameters["name"] = POOL
    elif path.startswith("/v1/fleets/") and method != "DELETE":
        parameters["name"] = FLEET


def _bound(values: Any) -> None:
    if not isinstance(values, dict):
        return
    if str(values.get("follow", "")).lower() in ("true", "1"):  # such a stream never ends
        values["follow"] = False
    for name in _WAITS:
        if isinstance(values.get(name), int | float) and values[name] > _MOST_S:
            values[name] = _MOST_S


@schemathesis.serializer("application/x-tar")
def tar(context: Any, value: Any) -> bytes:
    """Bytes that are hardly an archive."""
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")
