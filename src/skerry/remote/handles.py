"""Handles of a server's sandboxes, and all that a handle needs of the registry, by calls to the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from skerry.agent.client import AgentClient
from skerry.aio import run_to_end
from skerry.config import Config
from skerry.errors import Conflict, InvalidSpec, NotFound, SkerryError, StoreUnavailable, WrongState
from skerry.ledger.ledger import OFF, Ledger
from skerry.manager.admission import HostRoom
from skerry.manager.handles import Handles
from skerry.model.records import Cause, Record
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId, Spec
from skerry.net.websocket import WebSocket
from skerry.providers.base import Enforcement, Provider
from skerry.remote.api import LONG_S, TIMEOUT_S, Api, segment
from skerry.remote.provider import Remote, greeted
from skerry.remote.records import View, body_of
from skerry.sandbox.connection import Connection
from skerry.sandbox.network import Decide, NetworkRules
from skerry.sandbox.sandbox import AsyncSandbox

_TRIES = 3
"""How often a create with a key is sent, and a change of rules that others change meanwhile is made."""


class RemoteHandles(Handles):
    """One handle for each sandbox that was asked for; what they need of the registry, the server does."""

    def __init__(self, api: Api, config: Config) -> None:
        self.api = api
        self._config = config
        self._remote = Remote(api)
        self._handles: dict[SandboxId, AsyncSandbox] = {}
        self._leashes: dict[SandboxId, WebSocket] = {}
        self._on_seen = lambda record: None

    def provider(self, name: str) -> Provider:
        return self._remote

    @property
    def ledger(self) -> Ledger:
        """The server writes its own."""
        return OFF

    async def aclose(self) -> None:
        await super().aclose()
        while self._leashes:
            self._leashes.popitem()[1].close()

    async def room(self) -> HostRoom:
        """The server's, for admins. Raises NotPermitted."""
        return await self.api.get("/host", HostRoom)

    async def record(self, reference: str) -> Record:
        """The record of a sandbox, also when it has ended."""
        return (await self.api.get(path_of(reference), View)).record()

    async def live_record(self, reference: str) -> Record:
        record = await self.record(reference)
        if not record.is_live:
            raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
        return record

    async def wake(self, id: SandboxId) -> Record:
        return (await self.api.send("POST", f"{path_of(id)}/resume", View, {}, timeout_s=LONG_S)).record()

    async def look(self, id: SandboxId) -> Record:
        await self.api.get(f"{path_of(id)}/explain", dict[str, Any])  # the server asks its host for it
        return await self.record(id)

    async def make(
        self,
        id: SandboxId,
        spec: Spec,
        *,
        ephemeral: bool = False,
        key: str | None = None,
        on_known: Callable[[], None] | None = None,
    ) -> Record:
        """Create a sandbox, whose id the server gives. With a key it is asked for again if no answer came."""
        spec, values = _with_values(spec)
        record = await self._create(body_of(spec, self._config), key)
        try:
            if values:
                await self.provide(record.id, values)
            if ephemeral:
                await self._leash(record.id)
        except BaseException:
            with suppress(SkerryError):  # what went wrong before is told
                await run_to_end(self.destroy(record.id, grace_s=0))
            raise
        return record

    async def _create(self, body: dict[str, Any], key: str | None) -> Record:
        headers = {} if key is None else {"Idempotency-Key": key}
        for left in range(1 if key is None else _TRIES, 0, -1):
            try:
                made = self.api.send("POST", "/sandboxes", View, body, headers=headers, timeout_s=LONG_S)
                return (await made).record()
            except StoreUnavailable:
                if left == 1:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _leash(self, id: SandboxId) -> None:
        """Tie a sandbox to this program: the server ends it when this stream ends."""
        socket = await self.api.websocket(f"{path_of(id)}/agent", {"leash": True})
        stream = await greeted(socket)
        assert isinstance(stream, WebSocket)
        stream.start(_Deaf())
        self._leashes[id] = stream

    async def adopt(self, id: SandboxId, spec: Spec, enforced: Mapping[str, Enforcement] | None = None) -> Record:
        raise InvalidSpec("a server takes no sandboxes that were made elsewhere")

    async def destroy(
        self,
        reference: str,
        *,
        volumes: bool = False,
        cause: Cause = Cause.USER,
        grace_s: float | None = None,
        connection: Connection | None = None,
    ) -> None:
        if connection is not None:
            connection.close()
        record = await self.record(reference)
        await self.release(record.id)
        if record.is_live:
            asked = {"volumes": volumes, "grace_s": grace_s}
            timeout_s = TIMEOUT_S + (grace_s or 0.0)
            await self.api.order("DELETE", path_of(record.id), query=asked, timeout_s=timeout_s)
        leash = self._leashes.pop(record.id, None)
        if leash is not None:
            leash.close()

    async def terminate(self, record: Record, grace_s: float | None) -> None:
        """The server asks processes to end when it ends their sandbox."""
        return

    async def note_lifetime(self, id: SandboxId, lifetime: float | str | None, idle: float | str | None) -> Record:
        """What the server has written down when it was told over the agent's stream."""
        return await self.record(id)

    async def change_rules(self, id: SandboxId, decide: Decide, version: int | None = None) -> Record:
        for _ in range(_TRIES):
            record = await self.live_record(id)
            if version not in (None, record.version):
                raise Conflict(f"sandbox {id} has changed: its version is {record.version}")
            allow, deny = decide(record.spec)
            body, headers = {"allow": list(allow), "deny": list(deny)}, {"If-Match": f'"{record.version}"'}
            try:
                await self.api.send("PUT", f"{path_of(id)}/network", NetworkRules, body, headers=headers)
            except Conflict:
                continue
            return await self.record(id)
        raise Conflict(f"others keep changing the rules of sandbox {id}: try again")

    async def provide(self, id: SandboxId, values: Mapping[str, str]) -> None:
        await self.api.order("PUT", f"{path_of(id)}/secrets", {"values": dict(values)})

    async def note_env(self, id: SandboxId, env: Mapping[str, str]) -> None:
        """The server notes it when it is told over the agent's stream."""
        return

    async def known_env(self, id: SandboxId, client: AgentClient, own: Mapping[str, str]) -> dict[str, str]:
        """The server tells agents of other users what it knows."""
        return {}


class _Deaf:
    """Receiver of a stream on which nothing is said."""

    def received(self, data: memoryview) -> None:
        return

    def closed(self, error: Exception | None) -> None:
        return


def path_of(reference: str) -> str:
    return f"/sandboxes/{segment(reference)}"


def _with_values(spec: Spec) -> tuple[Spec, dict[str, str]]:
    """A spec whose secrets have their values from us, and those values: this program has them, the server does not.
    Raises InvalidSpec for one that is not in our environment."""
    ours: dict[str, Secret] = {
        name: secret
        for name, secret in spec.secrets.items()
        if not (secret.file or secret.command or secret.given)
    }  # fmt: skip
    if not ours:
        return spec, {}
    from skerry.gate.secrets import from_environment

    values = from_environment(ours)
    given = {name: msgspec.structs.replace(secret, env=None, given=True) for name, secret in ours.items()}
    return msgspec.structs.replace(spec, secrets={**spec.secrets, **given}), values


def not_here(what: str) -> SkerryError:
    """The error for what only the server itself can do."""
    return WrongState(f"{what}: that is the server's own, and is done on its machine")
