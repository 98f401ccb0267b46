"""Domain mode: names below a domain, TLS with an authority of our own or a certificate of the user's, on one port."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from manager.world import config_of
from surfaces.e2b.e2b_world import E2b, e2b_serving

from skerry.errors import ConfigError
from skerry.gate import authority, ca
from skerry.providers.mock import Mock
from skerry.surfaces.e2b.tls import ca_folder

DOMAIN = "e2b.test"


async def answer_of(e2b: E2b, name: str, path: str, trust: str, *headers: str, asked: str | None = None) -> str:
    """The answer of the server by one of its names, over TLS."""
    context = ssl.create_default_context(cadata=trust)
    context.set_alpn_protocols(["h2", "http/1.1"])
    port = int(e2b.url.rpartition(":")[2])
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        lines = [f"GET {path} HTTP/1.1", f"host: {asked or name}:{port}", "connection: close", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        text = (await reader.read()).decode()
        writer.close()
    return text


async def test_every_name_below_the_domain_is_trusted_by_the_installations_own_authority(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with e2b_serving(tmp_path, mock_provider, e2b_domain=DOMAIN) as e2b:
        trust = ca.certificate(ca_folder(config_of(tmp_path)))
        key = f"x-api-key: {e2b.key}"
        assert (await answer_of(e2b, f"api.{DOMAIN}", "/sandboxes", trust, key)).startswith("HTTP/1.1 200")
        made = await e2b.create()
        assert made["domain"].startswith("localhost:")  # it was asked for in plain mode
        envd = f"49983-{made['sandboxID']}.{DOMAIN}"
        assert (await answer_of(e2b, envd, "/health", trust)).startswith("HTTP/1.1 204")
        closed = await answer_of(e2b, f"3000-{made['sandboxID']}.{DOMAIN}", "/", trust)
        assert closed.startswith("HTTP/1.1 502")
        assert "port is not open" in closed
        other = await answer_of(e2b, f"api.{DOMAIN}", "/sandboxes", trust, key, asked="evil.example")
        assert other.startswith("HTTP/1.1 421")
        with pytest.raises(ssl.SSLCertVerificationError):
            await answer_of(e2b, "api.another.test", "/sandboxes", trust)


async def test_the_port_speaks_plain_http_too(tmp_path: Path, own_registry: None, mock_provider: Mock) -> None:
    async with e2b_serving(tmp_path, mock_provider, e2b_domain=DOMAIN) as e2b:
        assert (await e2b.call("GET", "/sandboxes")).json() == []


async def test_a_connection_that_says_nothing_holds_nobody_up(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    async with e2b_serving(tmp_path, mock_provider, e2b_domain=DOMAIN) as e2b:
        port = int(e2b.url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert (await e2b.call("GET", "/sandboxes")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_a_certificate_of_the_users_is_shown_where_there_is_one(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    made = authority.Authority(folder)
    chain = folder / "chain.pem"
    chain.write_bytes(authority._pem(made._leaf_key) + made._mint(f"*.{DOMAIN}"))
    async with e2b_serving(tmp_path, mock_provider, e2b_domain=DOMAIN, e2b_tls_cert=str(chain)) as e2b:
        answer = await answer_of(e2b, f"api.{DOMAIN}", "/sandboxes", ca.certificate(folder), f"x-api-key: {e2b.key}")
        assert answer.startswith("HTTP/1.1 200")
        assert not ca_folder(config_of(tmp_path)).joinpath("ca.pem").exists()


async def test_a_certificate_that_cannot_be_read_is_a_wrong_setting(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    with pytest.raises(ConfigError, match="e2b_tls_cert"):
        async with e2b_serving(tmp_path, mock_provider, e2b_domain=DOMAIN, e2b_tls_cert="/none.pem"):
            pass
