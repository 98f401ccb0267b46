"""Settings of admission, the ledger, the server and the rules of sandboxes, each a section of the configuration."""

from __future__ import annotations

from typing import Literal

import msgspec


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the rules of sandboxes may speak of, beside what is known to all."""

    hosts: dict[str, tuple[str, ...]] = {}
    """Addresses of names, private ones included: they are connected to without a question to DNS."""
    sets: dict[str, tuple[str, ...]] = {}
    """Named sets of rules of this installation's own."""
    ca: str | None = None
    """File of certificates that the gate trusts beside those of the host, where it opens TLS for a secret."""


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When this host has room for another box, beside `min_free_memory`."""

    wait_s: float = 5.0
    """Seconds that a create waits for room before it is refused."""
    overcommit: float = 0.0
    """How many times the memory of the host its sandboxes may be promised together; 0 is any amount."""
    min_free_disk: int = 64 << 20
    """Bytes that have to be free where the state folder is, and a thousand inodes; 0 is no look."""
    max_cpu_pressure: float = 0.0
    """The most percent of the last 10 s in which something waited for a processor; 0 is no look."""
    max_memory_pressure: float = 20.0
    """The most percent of the last 10 s in which all stood still for want of memory, while little is free; 0 is no
    look."""


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the ledger."""

    enabled: bool = True
    max_bytes: int = 64 << 20
    """Size of a file from which on the next line begins another."""
    keep: int = 16
    """The most files that are kept beside the newest; 0 is all."""
    when_full: Literal["stop", "go-on"] = "stop"
    """Whether new work stops when a line cannot be written, or goes on, and lines are lost."""
    commands: Literal["redacted", "names", "off"] = "redacted"
    """What is written of commands: all but what looks like a secret, the name of the program, or nothing."""
    redact: tuple[str, ...] = ()
    """Patterns whose matches in commands are hidden too."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `skerry serve`."""

    listen: tuple[str, ...] = ("127.0.0.1:7357",)
    """Addresses with ports. Others than those of the loopback need `expose`, and a certificate."""
    socket: str = ""
    """Unix socket, whose peers are known by their uid; empty: `server.sock` in the state folder, `off`: none."""
    expose: bool = False
    """Listen also where other machines reach us."""
    tls_cert: str = ""
    tls_key: str = ""
    hosts: tuple[str, ...] = ()
    """Names by which clients may call the server, beside localhost and the addresses it listens on."""
    ports_host: str = "localhost"
    """Name below which ports of sandboxes have names of their own: PORT-ID.HOST. With a proxy that speaks TLS before
    the server it is `https://HOST`."""
    max_body: int = 8 << 20
    """The most bytes of a request that is not an upload."""
    webhook_allow: tuple[str, ...] = ()
    """Private addresses that webhooks of tenants may reach, as rules: 10.1.2.3:8080, 10.0.0.0/8."""
    rate: int = 500
    """Calls a second of one token or user, and requests a second for the ports of one sandbox, over a while; twice as
    many at once."""
    max_calls: int = 256
    """The most calls of one token or user, and requests for the ports of one sandbox, that are served at a time."""
    max_connections: int = 4096
    """The most connections at a time, beside those on the unix socket."""
    drain_s: float = 10.0
    """Seconds that calls have to come to their end when the server is told to end."""
    metrics: Literal["admin", "loopback"] = "admin"
    """Who may read /metrics: admins, or also whoever connects from this host, without a token."""
    log_json: bool = False
    """Log lines as JSON."""
    e2b: bool = True
    """Whether E2B's clients are served, at addresses of their own."""
    e2b_listen: tuple[str, ...] = ("127.0.0.1:7358",)
    """Addresses for E2B's clients, under the same conditions."""
    e2b_domain: str = ""
    """Name below which E2B's clients find us by TLS: `api.NAME`, `49983-ID.NAME`; empty: in plain mode alone."""
    e2b_tls_cert: str = ""
    """Certificate for `*.NAME`; if there is none, an authority of our own makes it."""
    e2b_tls_key: str = ""
