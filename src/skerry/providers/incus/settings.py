"""The settings of Incus: where it is, whose project, which pool and network, and what a box gets by default."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from skerry.errors import ConfigError
from skerry.providers.daemon_config import DaemonConfig


class IncusConfig(DaemonConfig, frozen=True):
    host: str = "unix:///var/lib/incus/unix.socket"
    """The daemon: unix:///path or https://host:port."""
    certificate: str = ""
    """For https: the file with our own certificate, which the daemon has to trust."""
    key: str = ""
    """For https: the file with its key."""
    server_certificate: str = ""
    """For https: the file with the daemon's own certificate, which is the only one that is then believed."""
    project: str = "default"
    """The Incus project that boxes, volumes and images are in."""
    pool: str = ""
    """Where boxes and volumes lie; empty: the pool of the project's default profile."""
    network: str = ""
    """The managed bridge of boxes that ask for one; empty: the only one there is."""
    disk: int | str = "10G"
    """The whole root, its image included, where the pool holds limits."""

    def tls(self) -> ssl.SSLContext | None:
        """How both sides prove who they are; None for a socket of this machine."""
        parts = urlsplit(self.host)
        if parts.scheme == "unix" and parts.path:
            return None
        try:
            port = parts.port
        except ValueError:  # out of range
            port = None
        if parts.scheme != "https" or not parts.hostname or not port:
            raise ConfigError(f"providers.incus.host: {self.host!r} is neither unix:///path nor https://host:port")
        if not self.certificate or not self.key:
            raise ConfigError(
                "providers.incus: https needs certificate and key, a pair of files that the daemon trusts: "
                "`incus config trust add-certificate FILE` there"
            )
        try:
            context = ssl.create_default_context(cafile=self.server_certificate or None)
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"providers.incus: a certificate or key cannot be read: {error}") from error
        # A daemon's own certificate names no host by which it is reached; it alone is believed, which is more.
        context.check_hostname = not self.server_certificate
        return context
