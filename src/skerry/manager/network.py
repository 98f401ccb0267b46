"""Networks of sandboxes that have rules: what their boxes are told, and what the gate is told of each change."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from skerry import clock
from skerry.config import Config
from skerry.errors import ConfigError, Conflict, GateUnavailable, InvalidSpec, NotFound, Unsupported, WrongState
from skerry.model.records import FLEET_LABEL, Record
from skerry.model.spec import Network, SandboxId, Spec
from skerry.model.states import State
from skerry.sandbox.network import Decide
from skerry.store import Changes, Store

if TYPE_CHECKING:
    from skerry.gate.client import GateClient

_PROXY = "http://127.200.0.1:3128"
_PROXY_ENV = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _PROXY),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
_log = logging.getLogger("skerry.manager")


class Networks:
    """Rules of an installation's sandboxes. What is of no concern to a sandbox without rules costs it nothing."""

    def __init__(self, store: Store, config: Config, *, is_shared: bool) -> None:
        """`is_shared`: another process finds and reaches the sandboxes of this manager, by the configuration alone."""
        self._store = store
        self._config = config
        self.is_shared = is_shared
        self._gate: GateClient | None = None

    @property
    def gate(self) -> GateClient:
        from skerry.gate.client import GateClient  # most sandboxes have no rules, and start without it

        self._gate = self._gate or GateClient(self._config)
        return self._gate

    def check(self, spec: Spec) -> None:
        """Raise Unsupported if no gate could serve a spec, or InvalidSpec for a set of rules, a fleet, or a variable or
        file of a secret, that there is not, or ConfigError where secrets cannot be used."""
        if spec.network is not Network.RULES:
            return
        self._refuse_alone(spec)
        self._check_rules(spec.allow, spec.deny)
        if spec.reach and FLEET_LABEL not in spec.labels:
            raise InvalidSpec("reach: only members of a fleet reach each other; use a fleet's file", field="reach")
        _values(spec)
        if spec.secrets and importlib.util.find_spec("cryptography") is None:
            how = "pip install 'skerry[network]', or scripts/bootstrap in a checkout"
            raise ConfigError(f"secrets need the package cryptography, which is not installed: {how}")
        for name, secret in spec.secrets.items():
            if secret.file is not None and not os.access(secret.file, os.R_OK):
                raise InvalidSpec(f"secrets: {name}: there is no file {secret.file} that you may read", field="secrets")

    def env(self, spec: Spec) -> dict[str, str]:
        """Variables that a box has for its network, unless its spec says something else of them."""
        if spec.network is not Network.RULES:
            return {}
        return {**_PROXY_ENV}

    def with_env(self, spec: Spec) -> Spec:
        """The spec with all variables that its box is told."""
        env = self.env(spec)
        return msgspec.structs.replace(spec, env={**env, **spec.env}) if env else spec

    async def bring_up(self, id: SandboxId, spec: Spec, record: Record | None = None) -> None:
        """Have the gate serve a box that was just started, and wait until it does; `record` is that of a sandbox which
        is new. Raises GateUnavailable."""
        if spec.network is Network.RULES:
            secrets = None if record is None else _values(spec)
            await self.gate.look(id, spec.provider, fresh=True, record=record, secrets=secrets)

    async def look(self, record: Record) -> None:
        """Have the gate look at a sandbox again, and wait until its rules hold. Raises GateUnavailable."""
        if record.spec.network is Network.RULES:
            await self.gate.look(record.id, record.spec.provider)

    async def claim(self, record: Record) -> None:
        """The same for a sandbox that is somebody else's from now on, and his secrets. Raises GateUnavailable."""
        if record.spec.network is Network.RULES:
            await self.gate.look(record.id, record.spec.provider, secrets=_values(record.spec))

    async def provide(self, record: Record, values: Mapping[str, str]) -> None:
        """Give secrets of a sandbox other values. Raises InvalidSpec for those that are not given so, WrongState for a
        box without a gate, and GateUnavailable."""
        from skerry.gate.secrets import check_text

        for name, value in values.items():
            secret = record.spec.secrets.get(name)
            if secret is None or secret.file is not None or secret.command:
                why = "the sandbox has none of that name" if secret is None else "its value is a file's or command's"
                raise InvalidSpec(f"secrets: {name}: {why}", field="secrets")
            check_text(name, value)
        if record.spec.network is not Network.RULES:
            raise WrongState(f"sandbox {record.id} has no gate that secrets are for; make one with network='rules'")
        await self.gate.look(record.id, record.spec.provider, secrets=values)

    async def ensure(self, records: Sequence[Record]) -> None:
        """Start the gate if it is not there and a sandbox of this machine needs it. That it cannot be is told in the
        log: it keeps nobody from using the sandbox."""
        here = clock.machine_id()
        served = [
            each
            for each in records
            if each.spec.network is Network.RULES and each.is_live and not each.doomed
            if each.state is not State.CREATING and each.owner.host.partition("/")[0] == here
        ]
        if not served or not self.is_shared:
            return
        try:
            is_new = await self.gate.ensure()
            if is_new:
                _log.info("the gate was gone, and is started again")
            for each in served:
                values = _values(each.spec, required=False)
                if each.state is State.READY and (values or (is_new and len(served) == 1)):
                    await self.gate.look(each.id, each.spec.provider, secrets=values, offers=True)
        except GateUnavailable as error:
            _log.warning("sandboxes with rules have no network: %s", error)

    async def forget(self, record: Record) -> None:
        """Have the gate forget a sandbox that ends; it ends all connections of it."""
        if record.spec.network is Network.RULES and self.is_shared:
            await self.gate.forget(record.id)

    async def change(self, id: SandboxId, decide: Decide, version: int | None = None) -> Record:
        """Change rules: in the registry, then in the gate. Raises WrongState for a box without a gate, NotFound,
        InvalidSpec, Conflict if it has another `version` by now, and GateUnavailable: then the change is written down,
        and holds as soon as there is a gate."""

        async def change(record: Record) -> Changes | None:
            if version not in (None, record.version):
                raise Conflict(f"sandbox {record.id} was changed by somebody else: look again")
            if not record.is_live or record.doomed:
                raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
            if record.spec.network is not Network.RULES:
                how = f"its box was made with the network {record.spec.network}"
                raise WrongState(f"sandbox {record.id} can be given no rules: {how}; make one with network='rules'")
            allow, deny = decide(record.spec)
            spec = msgspec.structs.replace(record.spec, allow=tuple(allow), deny=tuple(deny))
            self._check_rules(spec.allow, spec.deny)
            return None if spec == record.spec else {"spec": spec, "kind": "rules"}

        record = await self._store.get(id)
        if record.spec.network is Network.RULES:
            self._refuse_alone(record.spec)
        record = await self._store.update(record, change)
        await self.look(record)
        return record

    def _refuse_alone(self, spec: Spec) -> None:
        if not self.is_shared:
            reason = "its registry or provider is an object of this program, which the gate does not have"
            raise Unsupported("network", spec.provider, reason)

    def _check_rules(self, allow: Sequence[str], deny: Sequence[str]) -> None:
        from skerry.model.rules import Rules

        Rules.of(allow, deny, self._config.network.sets)


def _values(spec: Spec, *, required: bool = True) -> dict[str, str]:
    """Values of secrets that this program has in its environment; the gate finds the others by itself. Raises
    InvalidSpec for one that is required and not there."""
    if not spec.secrets:
        return {}
    from skerry.gate.secrets import from_environment

    found: dict[str, str] = {}
    for name, secret in spec.secrets.items():
        try:
            found |= from_environment({name: secret})
        except InvalidSpec:
            if required:
                raise
    return found
