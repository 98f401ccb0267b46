"""The parts of a manager that need the registry, made for each other."""

from __future__ import annotations

from collections.abc import Callable

from skerry.config import Config
from skerry.ledger.ledger import OFF, Ledger
from skerry.manager.addresses import Addresses
from skerry.manager.admission import Admission
from skerry.manager.create import Creator
from skerry.manager.handles import Handles
from skerry.manager.network import Networks
from skerry.manager.providers import Providers
from skerry.manager.rebuild import Rebuilder
from skerry.manager.repair import Repair
from skerry.manager.verbs import Power, Storage
from skerry.manager.watch import Watcher
from skerry.model.records import Record
from skerry.store import Store


class Parts:
    """The parts of a manager that need the registry."""

    def __init__(
        self,
        store: Store,
        config: Config,
        providers: Providers,
        on_seen: Callable[[Record], None],
        *,
        shared: bool,
        like: Parts | None = None,
    ) -> None:
        """`shared`: other programs have the same registry and providers. Creates wait in one line with those of `like`,
        parts for another project."""
        if store.instance and store.ledger is OFF:  # a registry in memory belongs to no installation
            store.ledger = Ledger.of(config)
        addresses = Addresses(config, is_shared=shared)
        networks = Networks(store, config, is_shared=shared)
        self.admission: Admission = Admission() if like is None else like.admission
        creator = Creator(store, config, addresses, networks, self.admission)
        rebuilder = Rebuilder(store, creator)
        self.store = store
        self.creator = creator
        self.repair = Repair(store, providers, rebuilder, addresses, networks)
        self.watch = Watcher(store, providers, self.repair)
        self.handles = Handles(store, providers, creator, self.watch, self.repair, on_seen, addresses, networks)
        self.power = Power(store, self.handles, creator)
        self.storage = Storage(store, providers, self.handles, creator, rebuilder)

    async def look_after_all(self) -> float:
        """Finish and end what has to be, and put to sleep what nobody uses; in how many seconds there may be more."""
        return min(await self.repair.unfinished(), await self.power.sleep_unused())
