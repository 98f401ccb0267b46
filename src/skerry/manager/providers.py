"""The providers of a manager: found by name, and asked before anything is made whether they can do what is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from skerry import providers
from skerry.config import Config
from skerry.errors import ConfigError, CreateFailed, InvalidSpec, NotFound, ProviderUnavailable, Unsupported
from skerry.model.records import Filter
from skerry.model.spec import IMAGE_COMMAND, Network, Spec
from skerry.providers.base import OPTIONAL_FIELDS, Capability, Enforcement, Provider
from skerry.store import Store

_log = logging.getLogger("skerry.manager")


class Providers:
    """Providers by name: those that were given, which stay their giver's, and those that the configuration has."""

    def __init__(self, config: Config, given: Mapping[str, Provider]) -> None:
        self._config = config
        self.given = frozenset(given)
        self._loaded: dict[str, Provider] = dict(given)

    def get(self, name: str) -> Provider:
        """Raises NotFound, ConfigError or ProviderUnavailable if there is no such provider here."""
        if name not in self._loaded:
            self._loaded[name] = self._config.load_provider(name)
        return self._loaded[name]

    def loaded(self, name: str) -> Provider | None:
        """One that was used already; None if it was not."""
        return self._loaded.get(name)

    async def load(self, name: str) -> Provider:
        """The same, while others go on: what it imports is imported in a thread."""
        if name not in self._loaded:
            await asyncio.to_thread(providers.provider_class, name)
        return self.get(name)

    async def names(self, store: Store) -> list[str]:
        """All that were used, the default, and each that the registry ever spoke of: a box may come after its end."""
        records = await store.list(Filter(include_ended=True))
        return sorted({record.spec.provider for record in records} | {self._config.provider, *self._loaded})

    async def having(self, capability: Capability, store: Store, name: str | None) -> list[Provider]:
        """The one that is named; or all that have a capability, without those that are no longer installed."""
        if name is not None:
            return [self.get(name)]
        found = []
        for each in await self.names(store):
            try:
                found.append(self.get(each))
            except (NotFound, ConfigError, ProviderUnavailable) as error:
                _log.debug("provider %s is passed over: %s", each, error)
        return [provider for provider in found if capability in provider.capabilities]

    async def aclose(self) -> None:
        """Close those that were loaded here; boxes live on."""
        for name, provider in self._loaded.items():
            if name not in self.given:
                await provider.aclose()


def require_capability(provider: Provider, capability: Capability) -> Any:
    """The provider as one that has the verbs of a capability. Raises Unsupported if it has not."""
    if capability not in provider.capabilities:
        raise Unsupported(capability.value, provider.name, f"it has no {capability}; choose another provider")
    return provider


def refuse_unknown(provider: Provider, spec: Spec) -> None:
    """Raise Unsupported for the first optional field that was asked for and that this provider does not know."""
    for field in sorted(spec.asked() & (OPTIONAL_FIELDS - provider.honours)):
        raise Unsupported(field, provider.name, "it has no such thing; leave it out, or choose another provider")
    if spec.command == IMAGE_COMMAND and "image" not in provider.honours:
        raise Unsupported("command", provider.name, "it has no images with a command of theirs; give one of your own")


def refuse_without_image(provider: Provider | type[Provider], spec: Spec) -> None:
    """Raise InvalidSpec for a spec that names neither image nor snapshot, where a box is made of one."""
    if provider.needs_image and spec.image is None and spec.snapshot is None:
        raise InvalidSpec(f"image: {provider.name} makes its boxes of one, and none is named", field="image")


def has_data_of_name(provider: Provider, spec: Spec) -> bool:
    """Whether a box is to have the data of its sandbox's name, as every one of that name has."""
    return spec.name is not None and spec.data is not False and "data" in provider.honours


def refuse_unenforced(provider: Provider, spec: Spec, enforced: Mapping[str, Enforcement]) -> None:
    """Raise Unsupported for the first limit that was asked for and that this host cannot hold."""
    for field in spec.asked():
        enforcement = enforced.get(field)
        if enforcement is not None and not enforcement.by:
            raise Unsupported(field, provider.name, enforcement.why_not)


async def admit(provider: Provider, spec: Spec) -> Mapping[str, Enforcement]:
    """Ask how each limit of the spec will be held. Raises Unsupported, before anything exists, for what cannot be."""
    refuse_unknown(provider, spec)
    with host_errors():
        enforced = await provider.enforcement(spec)
    refuse_unenforced(provider, spec, enforced)
    if spec.egress is not None:  # whatever the provider: what leaves the box goes through the gate, or does not leave
        by = "it has no network" if spec.network is Network.NONE else "the gate, where what is more waits"
        enforced = {**enforced, "egress": Enforcement(by=by)}
    return enforced


@contextmanager
def host_errors() -> Iterator[None]:
    """Turn whatever the host refuses a provider, such as one more descriptor, into CreateFailed."""
    try:
        yield
    except OSError as error:
        raise CreateFailed(f"the box cannot be made: {str(error) or type(error).__name__}") from error
