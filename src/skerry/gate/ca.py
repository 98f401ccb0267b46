"""The certificate authority of an installation: made once, trusted by boxes that have secrets, and used by the gate
alone to open TLS for the hosts of those secrets."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.errors import ConfigError
from skerry.host import folders, locks

if TYPE_CHECKING:
    from skerry.agent.client import AgentClient

IN_THE_BOX = ".skerry/ca.pem"
"""The bundle of a box, below its home."""
VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
)
"""Variables by which programs find the certificates that they trust."""
PROTOCOLS = ("http/1.1",)

_FILE = "ca.pem"
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS
)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n", re.DOTALL)
_LOCK_S = 30.0
_WRITE_S = 60.0


def made_once(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of a file of the owner alone, which whoever needs it first makes, whole or not at all. Raises
    OSError, or ProviderError if another holds its folder for too long."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        folders.make(path.parent)
    fd = locks.open_folder(path.parent)
    try:
        locks.wait(fd, _LOCK_S, f"another program holds {path.parent}")
        try:
            return path.read_bytes()
        except FileNotFoundError:
            data = make()
        with folders.whole_or_not_at_all(path, 0o600) as write:
            write(memoryview(data))
        return data
    finally:
        os.close(fd)


def certificate(folder: Path) -> str:
    """The CA's certificate, in PEM; the CA is made if there is none. Raises ConfigError."""
    return parts(folder)[1]


def bundle(folder: Path) -> bytes:
    """All that a box is to trust: what the host trusts, and the CA. Raises ConfigError."""
    return f"{_system_bundle()}\n{certificate(folder)}".encode()


async def write_bundle(client: AgentClient, home: str, folder: Path) -> None:
    """Put the bundle into a box, below the home of its user. Raises SkerryError."""
    path = f"{home.rstrip('/')}/{IN_THE_BOX}"
    params = {"path": path, "mode": 0o644, "atomic": True, "parents": True}
    call = client.open("write_file", params).patiently(_WRITE_S)
    try:
        await call.send(await asyncio.to_thread(bundle, folder))
        call.end()
        await call.result(dict[str, Any])
    finally:
        call.abandon()


def trust(extra: str | None = None) -> ssl.SSLContext:
    """The context of connections to real hosts: what this host trusts, and the certificates of the file `extra`. Raises
    ConfigError."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(list(PROTOCOLS))
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        if not context.cert_store_stats()["x509_ca"] and (system := _system_bundle()):
            context.load_verify_locations(cadata=system)
        if extra is not None:
            context.load_verify_locations(cafile=extra)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"network.ca: {extra}: no certificates can be read there: {reason}") from None
    return context


def parts(folder: Path) -> tuple[str, str]:
    """Key and certificate of the CA, in PEM; the CA is made if there is none. Raises ConfigError."""
    path = folder / _FILE
    try:
        text = made_once(path, _make).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the CA of this installation cannot be read or made: {error}") from None
    found = _CERTIFICATE.search(text)
    if found is None or "PRIVATE KEY" not in text:
        raise ConfigError(f"{path} is damaged: remove it, and make the sandboxes that have secrets anew")
    return text[: found.start()], found[0]


def _make() -> bytes:
    from skerry.gate import authority  # what makes certificates takes long to load

    return authority.make()


def _system_bundle() -> str:
    for path in _SYSTEM_BUNDLES:
        try:
            return Path(path).read_text("ascii", errors="ignore")
        except OSError:
            continue
    try:
        return resources.files("certifi").joinpath("cacert.pem").read_text("ascii")
    except (ModuleNotFoundError, OSError):
        return ""
