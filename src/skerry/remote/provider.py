"""The provider of a server's sandboxes, as their handles see it: a stream to the agent, through the server."""

from __future__ import annotations

from collections.abc import Mapping

from skerry.agent.client import AgentClient
from skerry.errors import AgentUnreachable, CallInterrupted, SkerryError, WrongState
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.net.stream import Stream
from skerry.net.websocket import WebSocket
from skerry.providers.base import BoxState, BoxStatus, Enforcement, Isolation, Provider
from skerry.remote.api import Api, closing_error
from skerry.remote.records import View

_STATES = {
    State.READY: BoxState.RUNNING,
    State.CREATING: BoxState.RUNNING,
    State.PAUSED: BoxState.PAUSED,
    State.ASLEEP: BoxState.ASLEEP,
    State.STOPPED: BoxState.STOPPED,
    State.LOST: BoxState.DEAD,
}


class Remote(Provider):
    """Boxes of a server. It makes none: that is the server's."""

    name = "remote"
    isolation = Isolation.NONE

    def __init__(self, api: Api) -> None:
        self._api = api

    async def check(self) -> None:
        await self._api.get("/sandboxes", dict[str, object], {"limit": 1})

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        raise _not_ours()

    async def create(self, id: SandboxId, spec: Spec) -> None:
        raise _not_ours()

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        raise _not_ours()

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        views = await self._api.pages("/sandboxes", View)
        return {each.id: BoxStatus(state=_STATES[each.state]) for each in views if each.state in _STATES}

    async def dial(self, id: SandboxId) -> Stream:
        """A stream to the agent, greeted already, so that a server that refuses has said why."""
        socket = await self._api.websocket(f"/sandboxes/{id}/agent")
        return await greeted(socket)


async def greeted(socket: WebSocket) -> Stream:
    """The stream once the server has greeted us. Raises whatever it refuses us for."""
    socket.is_relayed = True
    try:
        return (await AgentClient.greet(socket)).release()
    except (AgentUnreachable, CallInterrupted) as error:
        told = closing_error(socket.ended_by)
        if told is not None:
            raise told from error
        raise


def _not_ours() -> SkerryError:
    return WrongState("boxes are made and ended by the server: use the manager that is connected to it")
