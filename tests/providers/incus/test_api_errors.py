"""What Incus says is understood, though it says most with one status."""

from __future__ import annotations

import pytest

from skerry.errors import BoxFull, Conflict, LimitReached, NotFound, ProviderError, SkerryError
from skerry.providers.incus import api


@pytest.mark.parametrize(
    ("status", "text", "error", "advice"),
    [
        (500, "write /x: no space left on device", LimitReached, "free some room"),
        (500, "Failed: Disk quota exceeded", BoxFull, "larger disk="),
        (500, "fork/exec /usr/bin/tar: cannot allocate memory", LimitReached, "out of memory"),
        (500, 'Reached maximum number of instances of type "container" in project "p"', LimitReached, "project set"),
        (500, "Not enough uid/gid available for the container", LimitReached, "subuid"),
        (404, "Instance not found", NotFound, "not found"),
        (409, "Busy", Conflict, "Busy"),
        (500, 'Instance "x" already exists', Conflict, "already exists"),
        (400, "UNIQUE constraint failed: instances.project_id, instances.name", Conflict, "instances"),
        (400, "The instance is already stopped", api.AsItWas, "stopped"),
        (400, "Instance is frozen", api.Frozen, "frozen"),
        (409, 'IP address "10.0.0.2" already defined on another NIC', api.AddressTaken, "10.0.0.2"),
        (400, "Instance is running", api.StillRunning, "running"),
        (400, 'Instance is busy running a "stop" operation', api.Busy, "stop"),
        (200, "Failed: A matching non-reusable operation has now succeeded", api.Busy, "operation"),
        (403, 'Use of low-level config "raw.lxc" is forbidden', ProviderError, "restricted.containers.lowlevel=allow"),
        (500, "", ProviderError, "status 500"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, text: str, error: type[SkerryError], advice: str) -> None:
    found = api.api_error(status, text)
    assert type(found) is error
    assert advice in str(found)
    assert text in str(found)
