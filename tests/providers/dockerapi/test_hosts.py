"""Daemons elsewhere: behind TLS, where both sides prove who they are, and behind ssh, where its own program speaks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engines.daemons import Daemon, Dockerd, NotStartable, find
from engines.images import load

from skerry.config import load as load_config
from skerry.errors import ConfigError, ProviderUnavailable
from skerry.model.spec import Spec
from skerry.providers.docker import Docker
from skerry.providers.shared import proc_socket
from skerry.sandbox.sandbox import AsyncSandbox

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("docker")]


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, timeout=60, capture_output=True)


def sign(folder: Path, name: str, authority: str, extensions: str) -> None:
    """A key NAME.key and its certificate NAME.crt, by an authority that was made so."""
    openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj", f"/CN={name}",
            "-out", f"{name}.csr")  # fmt: skip
    (folder / f"{name}.ext").write_text(extensions)
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key",
            "-CAcreateserial", "-days", "2", "-out", f"{name}.crt", "-extfile", f"{name}.ext")  # fmt: skip


def make_authority(folder: Path, name: str) -> None:
    openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.crt",
            "-subj", f"/CN={name}", "-days", "2")  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Authorities `ours` and `other`, certificates `server` and `client` of ours, and a `stranger` of the other."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "other"):
        make_authority(folder, name)
    sign(folder, "server", "ours", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n")
    sign(folder, "client", "ours", "extendedKeyUsage=clientAuth\n")
    sign(folder, "stranger", "other", "extendedKeyUsage=clientAuth\n")
    return folder


def cert_path(folder: Path, certificates: Path, authority: str, client: str) -> Path:
    """A folder as Docker's own client has it."""
    folder.mkdir()
    for name, source in (("ca.pem", f"{authority}.crt"), ("cert.pem", f"{client}.crt"), ("key.pem", f"{client}.key")):
        (folder / name).write_bytes((certificates / source).read_bytes())
    return folder


class DockerdWithTls(Dockerd):
    """A Docker that also listens on a port, for those alone whose certificate `ours` has signed."""

    def __init__(self, certificates: Path) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        names = {"tlscacert": "ours.crt", "tlscert": "server.crt", "tlskey": "server.key"}
        files = {option: str(certificates / name) for option, name in names.items()}
        hosts = [self.address, f"tcp://127.0.0.1:{self.port}"]
        self.settings = {"tlsverify": True, **files, "hosts": hosts}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def tls_daemon(certificates: Path) -> Iterator[DockerdWithTls]:
    try:
        daemon = DockerdWithTls(certificates)
    except NotStartable as error:
        pytest.skip(str(error))
    try:
        daemon.start()
        load(daemon.address, "busybox")
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture
def by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are dialled through the daemon, as those elsewhere are."""
    monkeypatch.setattr(proc_socket, "is_of", lambda _pid, _container: False)


@asynccontextmanager
async def provider(folder: Path, cache: Path, **settings: str) -> AsyncIterator[Docker]:
    made = Docker(Docker.Config(state_dir=str(folder / "state"), cache_dir=str(cache), **settings))
    try:
        yield made
    finally:
        await made.aclose()


async def check_box(docker: Docker, image: str = "skerry-test/busybox") -> None:
    """A box is made, streams both ways, serves another user, and is gone."""
    await docker.check()
    sandbox = await AsyncSandbox.create(Spec.of(provider=docker.name, image=image, data=False), docker)
    try:
        data = os.urandom(3_000_000)
        await sandbox.files.write("blob", data)
        assert await sandbox.files.read("blob") == data
        assert (await sandbox.exec("id -u", user="root")).text == "0\n"
    finally:
        await sandbox.destroy(volumes=True)


async def test_a_daemon_behind_tls_is_used_as_any_other(
    tls_daemon: DockerdWithTls, certificates: Path, cache: Path, tmp_path: Path, by_exec: None
) -> None:
    mine = cert_path(tmp_path / "mine", certificates, "ours", "client")
    host = f"tcp://127.0.0.1:{tls_daemon.port}"
    async with provider(tmp_path, cache, host=host, tls_verify="1", cert_path=str(mine)) as docker:
        assert docker._engine.address == f"https://127.0.0.1:{tls_daemon.port}"
        await check_box(docker)


async def test_neither_a_strange_daemon_nor_a_strange_client_is_believed(
    tls_daemon: DockerdWithTls, certificates: Path, cache: Path, tmp_path: Path
) -> None:
    host = f"tcp://127.0.0.1:{tls_daemon.port}"
    wrong = {("other", "client"): "CERTIFICATE_VERIFY_FAILED", ("ours", "stranger"): "does not answer"}
    for (authority, client), why in wrong.items():
        folder = cert_path(tmp_path / f"{authority}-{client}", certificates, authority, client)
        async with provider(tmp_path, cache, host=host, cert_path=str(folder)) as docker:
            with pytest.raises(ProviderUnavailable, match=why):
                await docker.check()
    name = f"tcp://localhost:{tls_daemon.port}"  # which the daemon's certificate does not have
    mine = cert_path(tmp_path / "mine", certificates, "ours", "client")
    async with provider(tmp_path, cache, host=name, cert_path=str(mine)) as docker:
        with pytest.raises(ProviderUnavailable):
            await docker.check()
    with pytest.raises(ConfigError, match="DOCKER_CERT_PATH"):
        Docker(Docker.Config(host=host, cert_path=str(tmp_path / "none")))


def test_dockers_own_variables_say_where_it_is(
    own_registry: None, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = cert_path(tmp_path / "mine", certificates, "ours", "client")
    for name, value in (("HOST", "tcp://engine.test"), ("TLS_VERIFY", "1"), ("CERT_PATH", str(mine))):
        monkeypatch.setenv(f"DOCKER_{name}", value)
    docker = load_config().load_provider("docker")
    assert docker._engine.address == "https://engine.test:2376"  # type: ignore[attr-defined]
    monkeypatch.delenv("DOCKER_TLS_VERIFY")
    monkeypatch.delenv("DOCKER_CERT_PATH")
    docker = load_config().load_provider("docker")
    assert docker._engine.address == "http://engine.test:2375"  # type: ignore[attr-defined]


SSH = """#!{python}
import os, sys
with open("{log}", "a") as log:
    log.write(repr(sys.argv[1:]) + "\\n")
if "denied" in sys.argv:
    sys.exit("denied: Permission denied (publickey).")
os.environ["DOCKER_HOST"] = "{address}"
os.execvp("/bin/sh", ["sh", "-c", sys.argv[-1]])
"""


@pytest.fixture
def ssh(docker_daemon: Daemon, docker_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `ssh` that runs the command here; returns what it was called with."""
    if find("docker") is None:
        pytest.skip("no docker program here, which speaks for the daemon behind ssh")
    program, log = tmp_path / "bin/ssh", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(SSH.format(python=sys.executable, log=log, address=docker_daemon.address))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return log


async def test_a_daemon_behind_ssh_is_used_as_any_other(ssh: Path, cache: Path, tmp_path: Path, by_exec: None) -> None:
    async with provider(tmp_path, cache, host="ssh://me@there.test:2222") as docker:
        await check_box(docker)
    calls = {*ssh.read_text().splitlines()}
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-l", "me", "-p", "2222", "--", "there.test"]
    assert calls == {repr([*options, "docker system dial-stdio"])}
    async with provider(tmp_path, cache, host="ssh://denied") as docker:
        with pytest.raises(ProviderUnavailable, match=r"ssh://denied: denied: Permission denied \(publickey\)"):
            await docker.check()


@pytest.mark.parametrize(
    "address",
    [
        "ssh://-oProxyCommand=x", "ssh://-l@host", "ssh://host/path", "ssh://a b", "ssh://user:secret@host", "ssh://",
        "tcp://", "tcp://host:99999", "tcp://host/path", "tcp://me@host", "unix://", "ftp://host", "host",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="none of unix"):
        Docker(Docker.Config(host=address))
