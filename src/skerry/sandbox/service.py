"""The service of a sandbox: the command of its spec, which its agent keeps running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.errors import AgentProtocolError
from skerry.model.results import ServiceStatus
from skerry.model.spec import IMAGE_COMMAND, Spec
from skerry.sandbox.connection import Connect
from skerry.sandbox.processes import command_params

_MAX_LOG = 2 << 20
"""More than an agent keeps of a log."""


class _Told(msgspec.Struct, frozen=True):
    service: ServiceStatus | None


class _Heard(msgspec.Struct, frozen=True):
    listening: set[Annotated[int, msgspec.Meta(ge=1, le=65535)]] | None = None


async def begin(client: AgentClient, spec: Spec) -> ServiceStatus | None:
    """Have the agent begin the command of the spec, if it has one and does not run it already."""
    if spec.command is None:
        return None
    command: dict[str, Any] = {"image": True} if spec.command == IMAGE_COMMAND else command_params(spec.command)
    policy = {"restart": spec.restart.value, "ports": [port.port for port in spec.ports]}
    return (await client.call("serve", command | policy, type=_Told)).service


async def listening(client: AgentClient) -> set[int] | None:
    """Ports on which something in the box listens, as it tells; None if it does not. That only looks: a box that is
    idle stays so, and nothing of it is for the ledger."""
    return (await client.call("service", {"listening": True}, type=_Heard)).listening


class AsyncService:
    """The command that a sandbox was made with."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def status(self) -> ServiceStatus | None:
        """Its state now; None if the sandbox has no command, or has not begun it yet."""
        return (await (await self._connect()).call("service", type=_Told)).service

    async def logs(self, *, follow: bool = False) -> AsyncIterator[tuple[int, bytes]]:
        """The last 1 MiB that it wrote, over its restarts, as (fd, bytes); with `follow` also all that it will write,
        until it has ended for good. Raises NotFound if there is no service."""
        call = (await self._connect()).open("service_log", {"follow": follow})
        left = _MAX_LOG
        try:
            if not follow:
                call.within(CONTROL_TIMEOUT_S)
            async for fd, data in call.chunks():
                left -= 0 if follow else len(data)
                if left < 0:
                    raise AgentProtocolError("the agent tells more of a log than any keeps. Destroy this sandbox")
                yield fd, data
        finally:
            call.abandon()
