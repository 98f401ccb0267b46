"""The secrets of sandboxes, derived from one key of the installation: none is kept of any sandbox."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time

import msgspec

from skerry.model.spec import SandboxId
from skerry.store import Store
from skerry.surfaces.server.keys import InstallationKey

_SIGNATURE = re.compile(r"v1_[A-Za-z0-9+/]{43}")


class Keys:
    """What the secrets of all sandboxes are made of. All servers on a registry have the same."""

    def __init__(self, store: Store) -> None:
        """`store` sees everything."""
        self._installation = InstallationKey(store, "e2b")
        self._key: bytes | None = None

    async def open(self) -> None:
        """Read the installation's key. Raises StoreError."""
        self._key = self._key or await self._installation.read()

    def derive(self, purpose: str, id: SandboxId | str) -> str:
        """The secret of a sandbox for a purpose."""
        assert self._key is not None, "open it first"
        return hmac.digest(self._key, f"skerry-e2b 1\n{purpose}\n{id}".encode(), "sha256").hex()


class Signature(msgspec.Struct, frozen=True):
    """The signature of a URL of a file."""

    text: str
    path: str
    operation: str
    user: str
    expires: str = ""

    @property
    def is_formed(self) -> bool:
        """Whether it looks like one at all."""
        return _SIGNATURE.fullmatch(self.text) is not None

    def fits(self, token: str) -> bool:
        """Whether it was made with that token."""
        parts = [self.path, self.operation, self.user, token, *([self.expires] if self.expires else [])]
        digest = base64.b64encode(hashlib.sha256(":".join(parts).encode()).digest()).rstrip(b"=").decode()
        return hmac.compare_digest(f"v1_{digest}".encode(), self.text.encode())

    @property
    def is_expired(self) -> bool:
        return bool(self.expires) and (not self.expires.isdecimal() or int(self.expires) < time.time())
