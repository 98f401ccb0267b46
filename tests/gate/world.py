"""A little internet on the loopback, in a process of its own: sites by HTTP and HTTPS with a certificate authority of
their own, git over ssh, a database, and raw TCP. `python -m gate.world FOLDER [SOCKET]` serves it until its stdin
ends."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

NAMES = (
    "web.test", "other.test", "a.wild.test", "bad.wild.test", "wild.test", "xn--bcher-kva.test", "pypi.test",
    "registry.npm.test", "git.test", "deb.test", "db.test", "raw.test", "api.test",
)  # fmt: skip
PLACE = "/tmp/clients"
"""Where clients write."""
BUNDLE = f"{PLACE}/world.pem"
"""Where boxes have the certificate of the authority."""
TRUST = dict.fromkeys(
    ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT",
     "npm_config_cafile"),
    BUNDLE,
) | {"PIP_CONFIG_FILE": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}  # fmt: skip
"""Variables of a box that trusts it."""
_START_S = 60.0
_PIECE = bytes(1 << 18)


class World(NamedTuple):
    """What the tests know of it."""

    folder: Path
    ports: Mapping[str, int]
    """http, https, ssh, echo, greet, postgres."""

    @property
    def bundle(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def hosts(self) -> dict[str, str]:
        """For `network.hosts` of a configuration."""
        return dict.fromkeys(NAMES, "127.0.0.1")

    @property
    def has_database(self) -> bool:
        return (self.folder / "database").exists()

    def rule(self, name: str, service: str) -> str:
        return f"{name}:{self.ports[service]}"

    @property
    def allow(self) -> list[str]:
        """Rules for all that real clients reach."""
        sites = ("web.test", "pypi.test", "registry.npm.test", "git.test", "deb.test")
        others = (("git.test", "ssh"), ("db.test", "postgres"), ("raw.test", "echo"), ("raw.test", "greet"))
        return [
            *(self.rule(name, service) for name in sites for service in ("http", "https")),
            *(self.rule(name, service) for name, service in others),
        ]

    def seen(self) -> list[dict[str, Any]]:
        """Requests and connections that reached it, the oldest first."""
        return [json.loads(line) for line in (self.folder / "seen").read_text().splitlines()]

    def hosts_seen(self) -> set[str]:
        """Names that requests were made for, as they spelled them."""
        return {each["host"] for each in self.seen() if "host" in each}


@contextmanager
def running_world(database: str | None = None) -> Iterator[World]:
    """The little internet; `database` is the unix socket of a PostgreSQL."""
    with TemporaryDirectory(prefix="skerry-world-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # a plain user's test reads its certificate
        command = [sys.executable, "-m", "gate.world", folder, *([database] if database else [])]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                told = process.stdout.readline()
                assert told, "the little internet did not start"
                yield World(Path(folder), json.loads(told))
            finally:
                process.stdin.close()
                process.wait(_START_S)


class _Server:
    """All that it serves, in one event loop."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self.folder = folder
        self._database = database
        self._seen = (folder / "seen").open("a", buffering=1)
        if database is not None:
            (folder / "database").touch()

    def note(self, **facts: Any) -> None:
        self._seen.write(json.dumps(facts) + "\n")

    async def start(self) -> dict[str, int]:
        """Listen; the ports by what is there."""
        import asyncssh

        listeners = {name: _listener() for name in ("http", "https", "ssh", "echo", "greet", "postgres")}
        ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
        from gate import sites

        sites.build(self.folder / "sites", NAMES, ports["https"])
        trust = _certificates(self.folder)
        trust.sni_callback = lambda _tls, name, _context: self.note(sni=name)
        await asyncio.start_server(self._serve_site, sock=listeners["http"], backlog=1000)
        await asyncio.start_server(self._serve_site, sock=listeners["https"], ssl=trust, backlog=1000)
        await asyncio.start_server(self._echo, sock=listeners["echo"], backlog=1000)
        await asyncio.start_server(self._greet, sock=listeners["greet"], backlog=1000)
        await asyncio.start_server(self._relay, sock=listeners["postgres"])
        await asyncssh.listen(
            sock=listeners["ssh"],
            server_factory=_open_to_all(asyncssh),
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            process_factory=self._serve_git,
            encoding=None,
        )
        return ports

    async def _serve_site(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                fields = {
                    name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in head[1:])
                }
                host = fields.get("host", "")
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                self.note(host=host.partition(":")[0], target=target, fields=fields, body=body.decode("latin-1"))
                await self._answer(writer, method, host.partition(":")[0].lower().rstrip("."), target)
                if fields.get("connection", "").lower() == "close":
                    break
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, host: str, target: str) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        status, more, data = "200 OK", "", b""
        length = None
        if parts.path == "/redirect":
            status, more = "302 Found", f"Location: {query['to']}\r\n"
        elif parts.path == "/zeros" or parts.path == "/drip":
            length = int(query["bytes"])
        else:
            file = self.folder / "sites" / host / parts.path.lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if ".." in parts.path or not file.is_file():
                status = "404 Not Found"
            else:
                data = file.read_bytes()
        kind = "text/html" if "/simple/" in parts.path else "application/octet-stream"
        size = len(data) if length is None else length
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{more}\r\n"
        writer.write(head.encode() + (b"" if method == "HEAD" else data))
        while length:
            piece = _PIECE[: 1 if parts.path == "/drip" else length]
            writer.write(piece)
            await writer.drain()
            length -= len(piece)
            if parts.path == "/drip":
                await asyncio.sleep(1)
        await writer.drain()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.note(raw="echo")
        with suppress(OSError):
            while data := await reader.read(1 << 18):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.note(raw="greet")
        with suppress(OSError):
            writer.write(b"welcome\n")
            await reader.read()
        writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To the database, which listens on a unix socket only."""
        with suppress(OSError):
            if self._database is not None:
                inner, outer = await asyncio.open_unix_connection(self._database)
                await asyncio.gather(_copy(reader, outer), _copy(inner, writer))
        writer.close()

    async def _serve_git(self, process: Any) -> None:
        words = shlex.split(process.command or "")
        if len(words) != 2 or words[0] != "git-upload-pack":
            process.exit(128)
            return
        path = self.folder / "sites/git.test" / words[1].lstrip("/")
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "git", "-c", "safe.directory=*", "upload-pack", str(path), stdin=pipe, stdout=pipe, stderr=pipe
        )
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        await process.stdout.drain()
        process.exit(await child.wait())


def _open_to_all(asyncssh: Any) -> Any:
    class Door(asyncssh.SSHServer):  # type: ignore[misc]
        def begin_auth(self, username: str) -> bool:
            return False

    return Door


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def _listener() -> socket.socket:
    made = socket.create_server(("127.0.0.1", 0), backlog=1000)
    made.setblocking(False)
    return made


def _certificates(folder: Path) -> ssl.SSLContext:
    """An authority, its certificate in `ca.pem`, and a server's certificate for all names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("tests")).public_key(key.public_key())
        )
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        made = made.not_valid_after(now + timedelta(days=2))
        made = made.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        return made.add_extension(issuer, critical=False)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    ca = certificate("tests", ca_key, is_ca=True).add_extension(usage, critical=True).sign(ca_key, hashes.SHA256())
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES])
    leaf = certificate("sites", key, is_ca=False).add_extension(names, critical=False).sign(ca_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "leaf.pem").write_bytes(leaf.public_bytes(pem) + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem")
    return context


async def _main(folder: str, database: str | None = None) -> None:
    ports = await _Server(Path(folder), database).start()
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # connections that are still open end with us


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
