"""The CA of an installation, the certificates that it signs, and the bundle of a box."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from agent.guest_process import Guest

from skerry.errors import ConfigError
from skerry.gate import authority
from skerry.gate.authority import Authority
from skerry.gate.ca import IN_THE_BOX, bundle, certificate, trust, write_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state/gate"


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """A handshake of the two in memory; the client's side of it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    are_done: set[ssl.SSLObject] = set()
    while len(are_done) < 2:
        for side in (ours, theirs):
            try:
                side.do_handshake()
                are_done.add(side)
            except ssl.SSLWantReadError:
                continue
    return ours


def client_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=certificate(folder))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of newer Pythons
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def test_the_ca_is_made_once_and_its_key_is_the_owner_s_alone(folder: Path) -> None:
    first = certificate(folder)
    assert certificate(folder) == first
    assert (folder / "ca.pem").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE KEY" not in first


def test_many_programs_that_need_it_at_once_make_one(folder: Path) -> None:
    program = (
        f"from pathlib import Path; from skerry.gate.ca import certificate; print(certificate(Path({str(folder)!r})))"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate()[0] for process in started}) == 1
    assert os.listdir(folder) == ["ca.pem"]


@pytest.mark.parametrize("name", ["api.example.org", "a_b.example.org", f"{'a' * 60}.{'b' * 60}.example.org"])
def test_a_client_that_trusts_the_ca_takes_its_certificate_for_a_host(folder: Path, name: str) -> None:
    side = handshake(Authority(folder).context(name), client_of(folder), name)
    assert side.selected_alpn_protocol() == "http/1.1"
    assert ("DNS", name) in (side.getpeercert() or {})["subjectAltName"]


def test_a_client_that_trusts_others_does_not(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(Authority(folder).context("a.example.org"), client_of(tmp_path / "other"), "a.example.org")


@pytest.mark.parametrize("name", ["b.example.org", None])
def test_a_client_that_asks_for_another_host_gets_none(folder: Path, name: str | None) -> None:
    client = client_of(folder)
    client.check_hostname = False
    with pytest.raises(ssl.SSLError):
        handshake(Authority(folder).context("a.example.org"), client, name)


def test_contexts_are_kept_for_the_hosts_that_were_asked_for_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "_MAX_LEAVES", 2)
    made = Authority(folder)
    first = made.context("a.example.org")
    made.context("b.example.org")
    assert made.context("a.example.org") is first
    made.context("c.example.org")  # in the place of b, which was asked for longest ago
    assert made.context("a.example.org") is first
    assert len(made._leaves) == 2


def test_a_certificate_is_made_anew_long_before_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Authority(folder)
    first = made.context("a.example.org")
    now = authority.time.monotonic
    monkeypatch.setattr(authority.time, "monotonic", lambda: now() + 6 * 86400)
    assert made.context("a.example.org") is not first


def test_no_key_of_a_host_is_left_in_the_folder(folder: Path) -> None:
    Authority(folder).context("a.example.org")
    assert os.listdir(folder) == ["ca.pem"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"-----BEGIN PRIVATE KEY-----\nx\n-----BEGIN CERTIFICATE-----\n"])
def test_a_damaged_ca_says_which_file_it_is(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "ca.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=str(folder)):
        Authority(folder)


def test_without_its_package_the_way_to_it_is_told() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from skerry.errors import ConfigError\n"
        "try:\n    import skerry.gate.opener\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "secrets need cryptography" in told
    assert "pip install 'skerry[network]'" in told


def test_the_bundle_has_what_the_host_trusts_and_the_ca(folder: Path) -> None:
    text = bundle(folder).decode()
    assert certificate(folder) in text
    context = ssl.create_default_context(cadata=text)
    assert context.cert_store_stats()["x509_ca"] >= 1
    handshake(Authority(folder).context("a.example.org"), context, "a.example.org")


def test_real_hosts_are_verified_with_the_host_s_trust_and_the_configured_file(folder: Path, tmp_path: Path) -> None:
    company = tmp_path / "company"
    extra = tmp_path / "company.pem"
    extra.write_text(certificate(company))
    server = Authority(company).context("a.example.org")
    assert handshake(server, trust(str(extra)), "a.example.org").selected_alpn_protocol() == "http/1.1"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, trust(), "a.example.org")


@pytest.mark.parametrize("content", [None, "no certificates"])
def test_a_configured_file_without_certificates_is_an_error_of_the_configuration(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "company.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"network\.ca"):
        trust(str(file))


async def test_the_bundle_is_written_below_the_home_of_a_box(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with Guest() as guest:
        client = await guest.client()
        for _ in range(2):
            await write_bundle(client, str(home), folder)
        client.close()
    assert (home / IN_THE_BOX).read_bytes() == await asyncio.to_thread(bundle, folder)
