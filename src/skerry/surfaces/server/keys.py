"""Keys of an installation, which all servers on its registry have in common."""

from __future__ import annotations

import secrets

import msgspec

from skerry.errors import Conflict, NotFound
from skerry.store import Store


class _Key(msgspec.Struct, frozen=True):
    secret: str


class InstallationKey:
    """A key for one purpose, kept in the registry; made when it is first needed, by whoever is first."""

    def __init__(self, store: Store, purpose: str) -> None:
        """`store` sees everything."""
        self._keys = store.documents("key", _Key)
        self._purpose = purpose
        self._key: bytes | None = None

    async def read(self) -> bytes:
        """Raises StoreError."""
        if self._key is None:
            try:
                kept = await self._keys.get(self._purpose)
            except NotFound:
                try:
                    kept = await self._keys.add(self._purpose, _Key(secrets.token_hex(32)))
                except Conflict:
                    kept = await self._keys.get(self._purpose)
            self._key = bytes.fromhex(kept.body.secret)
        return self._key
