"""The opener: TLS of connections to hosts of secrets is ended here and begun again, and the requests in it get values
where a box wrote placeholders."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

from skerry.errors import SkerryError
from skerry.gate.authority import Authority
from skerry.gate.base import Dial, Duplex, Meter, Policy, Refused
from skerry.gate.ca import trust
from skerry.gate.conversation import Conversation, Host
from skerry.gate.hooks import Hooks
from skerry.gate.relay import finish
from skerry.gate.secrets import Vault, covering
from skerry.gate.substitute import Substitution
from skerry.gate.tls import TlsDuplex

_HANDSHAKE_S = 15.0
_CLEAR_PORT = 80
_NOT_TLS = b"""HTTP/1.1 400 Bad Request\r
Content-Type: text/plain\r
Connection: close\r
\r
skerry: a secret is for this host, so that connections to it are TLS. Name its port 80 to use that in clear.
"""


class TlsOpener:
    """Opens connections to hosts of secrets and changes requests on their way."""

    def __init__(self, folder: Path, vault: Vault, *, ca: str | None = None) -> None:
        """`folder`: that of the gate; `ca`: a file of certificates that are trusted beside those of the host. Raises
        ConfigError."""
        self._authority = Authority(folder)
        self._trust = trust(ca)
        self._vault = vault
        self._hooks = Hooks()

    def is_for(self, policy: Policy, name: str, port: int) -> bool:
        """Whether a connection to that host has to be opened."""
        return bool(policy.secrets) and bool(covering(policy.secrets, name, port))

    async def serve(self, policy: Policy, name: str, port: int, client: Duplex, dial: Dial, meter: Meter) -> None:
        """Serve a connection to its end, and close it. Raises Refused for what is no request that could be sent on,
        OSError if nothing can be read in the gate's folder."""
        secrets = covering(policy.secrets, name, port)
        substitution = Substitution(self._vault.placeholders(policy.id, secrets))
        host = Host(policy, name, port, secrets, substitution, self._vault, self._hooks, meter)
        if port == _CLEAR_PORT:
            await Conversation(host, client, dial).run()
            return

        async def connect() -> Duplex:
            return await self._connect(name, dial)

        try:
            opened = await self._open(name, client)
        except BaseException:
            await client.close()
            raise
        await Conversation(host, opened, connect).run()

    async def _open(self, name: str, client: Duplex) -> Duplex:
        """Be that host for a client. Raises Refused."""
        tls = TlsDuplex(client, self._authority.context(name))
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await tls.handshake()
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                with suppress(OSError, SkerryError):
                    await client.write(_NOT_TLS)
            with suppress(OSError, SkerryError):
                await finish(client)
            raise Refused(_why(error, name)) from None
        except TimeoutError:
            raise Refused("no TLS handshake came in time") from None
        return tls

    async def _connect(self, name: str, dial: Dial) -> Duplex:
        """Connect to the real host, and verify it. Raises OSError, SkerryError or Refused."""
        below = await dial()
        try:
            tls = TlsDuplex(below, self._trust, server_name=name)
            await tls.handshake()
        except BaseException:
            await below.close()
            raise
        return tls


def _why(error: ssl.SSLError, name: str) -> str:
    """A reason for a handshake that failed, with what to do where that is known."""
    reason = (error.reason or "it ended early").lower().replace("_", " ")
    if reason == "http request":
        return "plain HTTP to a host of a secret"
    if "unknown ca" in reason or "bad certificate" in reason or "certificate unknown" in reason:
        return (
            f"the program does not trust the CA of this installation ({reason}): have it use the file of $SSL_CERT_FILE"
        )
    if "callback failed" in reason or "unrecognized name" in reason:
        return f"the name in its TLS is not {name}"
    return f"TLS failed: {reason}"
