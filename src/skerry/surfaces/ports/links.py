"""Links to ports: signed, for one port of one sandbox, until they expire, are withdrawn, or the sandbox ends."""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from skerry.errors import LimitReached, NotFound
from skerry.model.spec import SandboxId
from skerry.store import Store
from skerry.surfaces.ports.places import Place
from skerry.surfaces.server.keys import InstallationKey

PARAMETER = "skerry-link"
"""What a link has after its `?`."""
DEFAULT_S = 8 * 3600.0
MAX_S = 30 * 86400.0
_TOKEN = re.compile(r"([0-9a-f]{16})\.([0-9]{1,12})\.([0-9A-Za-z_-]{43})")
_MOST = 100
"""Links of one sandbox at a time."""
_KEPT_S = 2.0
"""How long what was just read is believed: on other servers a link that is withdrawn ends within that."""
_MOST_KEPT = 10_000
_SWEEP_S = 60.0
_PAGE = 500


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link as it is kept: everything but its signature."""

    id: str
    """Its serial, which the ledger has."""
    port: int
    expires_at: float
    created_at: float
    created_by: str
    public: bool = False
    """Whether the port is open to everybody until then, without any signature."""


class Links:
    """The links of a registry. All servers on it sign with one key, which is kept there."""

    def __init__(self, store: Store) -> None:
        """`store` sees everything."""
        self._links = store.documents("port-link", Link)
        self._key = InstallationKey(store, "port-links")
        self._kept: dict[SandboxId, tuple[float, Sequence[Link]]] = {}
        self._swept_at = 0.0

    async def make(self, place: Place, *, project: str, public: bool, lifetime_s: float, created_by: str) -> Link:
        """Make a link. Raises LimitReached."""
        now = time.time()
        await self._sweep(now)
        if len(await self._read(place.id)) >= _MOST:
            raise LimitReached(f"sandbox {place.id} has {_MOST} links to its ports: withdraw those of a port")
        link = Link(
            id=secrets.token_hex(8),
            port=place.port,
            expires_at=float(int(now + lifetime_s)),
            created_at=now,
            created_by=created_by,
            public=public,
        )
        await self._links.add(f"{place.id}:{link.id}", link, project=project)
        self._kept.pop(place.id, None)
        return link

    async def token(self, place: Place, link: Link) -> str:
        """The signed text that makes a URL a link."""
        expires = str(int(link.expires_at))
        return f"{link.id}.{expires}.{await self._sign(place, link.id, expires)}"

    async def of(self, id: SandboxId) -> Sequence[Link]:
        """The links to ports of a sandbox that have not expired."""
        now = time.time()
        until, found = self._kept.get(id, (0.0, ()))
        if time.monotonic() >= until:
            found = await self._read(id)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[id] = time.monotonic() + _KEPT_S, found
        return [link for link in found if link.expires_at > now]

    async def check(self, place: Place, token: str) -> Link | None:
        """The link that a token is of; None whatever is wrong with it."""
        form = _TOKEN.fullmatch(token)
        if form is None or not hmac.compare_digest(form[3], await self._sign(place, form[1], form[2])):
            return None
        return next((link for link in await self.of(place.id) if (link.id, link.port) == (form[1], place.port)), None)

    async def public(self, place: Place) -> Link | None:
        """The link by which a port is open to everybody, if it is."""
        return next((link for link in await self.of(place.id) if link.public and link.port == place.port), None)

    async def withdraw(self, place: Place) -> int:
        """Make all links to a port worthless, on this server at once and on others within seconds; how many."""
        found = [link for link in await self._read(place.id) if link.port == place.port]
        for link in found:
            await self._remove(f"{place.id}:{link.id}")
        self._kept.pop(place.id, None)
        return len(found)

    async def _read(self, id: SandboxId) -> Sequence[Link]:
        found: list[Link] = []
        first = after = f"{id}:"
        while page := await self._links.list(after=after, limit=_MOST):
            mine = [document.body for document in page if document.id.startswith(first)]
            found += mine
            if len(mine) < _MOST:
                break
            after = page[-1].id
        return found

    async def _remove(self, document: str) -> None:
        with suppress(NotFound):  # somebody else has
            await self._links.remove(document)

    async def _sweep(self, now: float) -> None:
        """Forget what has expired, now and then."""
        if time.monotonic() < self._swept_at + _SWEEP_S and self._swept_at:
            return
        self._swept_at, after = time.monotonic(), ""
        while page := await self._links.list(after=after, limit=_PAGE):
            after = page[-1].id
            for document in page:
                if document.body.expires_at <= now:
                    await self._remove(document.id)

    async def _sign(self, place: Place, serial: str, expires: str) -> str:
        text = f"skerry-link 1\n{place.id}\n{place.port}\n{serial}\n{expires}"
        mac = hmac.digest(await self._key.read(), text.encode(), "sha256")
        return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
