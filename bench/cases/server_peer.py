"""Create and first command over REST on Docker, beside OpenSandbox's server on the same daemon and the same image.

Its program in the box, execd, comes only as an image of a registry. Busybox stands in for it, a web server that hands
what it is sent to a shell, which is as little as can be done. All else is theirs: what their server asks of Docker, the
copying into the box, ports, its own store. So read their time as the least that they take.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from install_peers import python_of
from raw_engine import NotStartable, RawEngine, client_environment, started

from skerry.measure.figures import Figure, not_run, quicker

from .server import bearer, free_port, running, served
from .settings import Settings

_PEER = "OpenSandbox"
_CASE = "server-peer"
_IMAGE = "skerry-test/debian"
_STAND_IN = "skerry-bench/execd"
_PORT = 44772
"""At which its program in the box listens."""
_BOOTSTRAP = f"""#!/bin/sh
mkdir -p /tmp/in-box/cgi-bin && ln -s /opt/opensandbox/execd /tmp/in-box/busybox
printf '#!/bin/sh\\necho\\nexec sh\\n' > /tmp/in-box/cgi-bin/run && chmod 755 /tmp/in-box/cgi-bin/run
/tmp/in-box/busybox httpd -p {_PORT} -h /tmp/in-box
exec "$@"
"""
_CONFIG = """
[server]
host = "127.0.0.1"
port = {port}
[log]
level = "WARNING"
[runtime]
type = "docker"
execd_image = "{image}"
[store]
type = "sqlite"
path = "{folder}/opensandbox.db"
[docker]
network_mode = "bridge"
publish_host = "127.0.0.1"
[ingress]
mode = "direct"
"""
_AGAIN_S = 0.002
_UP_S = 30.0


async def server_peer(settings: Settings) -> list[Figure]:
    program, busybox = python_of(_PEER).with_name("opensandbox-server"), shutil.which("busybox")
    if not program.exists():
        return [not_run(_CASE, _PEER, "not installed; bench/install_peers.py does that")]
    if busybox is None:
        return [not_run(_CASE, _PEER, "no busybox, which stands in for its program in the box")]
    try:
        with started("docker", "busybox", "debian") as engine:
            _make_stand_in(engine, Path(busybox))
            with TemporaryDirectory(prefix="skb-", dir="/tmp") as folder:
                return _measure(settings, engine, program, folder)
    except NotStartable as error:
        return [not_run(_CASE, _PEER, str(error))]


def _measure(settings: Settings, engine: RawEngine, program: Path, folder: str) -> list[Figure]:
    variables = {"SKERRY_PROVIDER": "docker", "DOCKER_HOST": engine.address}
    ours: list[float] = []
    isolated: list[float] = []
    theirs: list[float] = []
    with (
        served(folder, variables) as (url, token, _),
        httpx.Client(base_url=url, headers=bearer(token), timeout=60, trust_env=False) as us,
        _peer(engine, program, folder) as them,
    ):
        for round in range(settings.rounds(16) + 1):
            times = _our_life(us, "bridge"), _our_life(us, "none"), _their_life(them)
            if round:  # the first imports, and fills caches
                for each, seconds in zip((ours, isolated, theirs), times, strict=True):
                    each.append(seconds)
    against = f"{_PEER}'s server with a stand-in in the box"
    return [
        quicker(_CASE, "create and first command over REST, with a bridge", ours, theirs, against=against, at_least=1),
        quicker(_CASE, "the same as each does it by itself: ours without a network", isolated, theirs, against=against),
    ]


def _our_life(client: httpx.Client, network: str) -> float:
    """Seconds from the call that creates to the end of the first command."""
    start = time.perf_counter()
    id = client.post("/v1/sandboxes", json={"image": _IMAGE, "network": network}).raise_for_status().json()["id"]
    said = client.post(f"/v1/sandboxes/{id}/exec", json={"command": "echo hello"}).raise_for_status().json()["stdout"]
    took = time.perf_counter() - start
    assert said == "hello\n", said
    client.delete(f"/v1/sandboxes/{id}?grace_s=0").raise_for_status()
    return took


def _their_life(client: httpx.Client) -> float:
    """The same, as their own client does it: the server tells where the box listens, and the command goes there."""
    body = {
        "image": {"uri": _IMAGE},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "timeout": 600,
        "resourceLimits": {"cpu": "1", "memory": "512Mi"},
    }
    start = time.perf_counter()
    id = client.post("/v1/sandboxes", json=body).raise_for_status().json()["id"]
    place = client.get(f"/v1/sandboxes/{id}/endpoints/{_PORT}").raise_for_status().json()["endpoint"]
    said = _say(client, f"http://{place.partition('/')[0]}/cgi-bin/run", b"echo hello\n")
    took = time.perf_counter() - start
    assert said == "hello\n", said
    client.delete(f"/v1/sandboxes/{id}").raise_for_status()
    return took


def _say(client: httpx.Client, url: str, command: bytes) -> str:
    end = time.monotonic() + _UP_S
    while True:
        try:
            return client.post(url, content=command).raise_for_status().text
        except httpx.TransportError:  # it does not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(_AGAIN_S)


@contextmanager
def _peer(engine: RawEngine, program: Path, folder: str) -> Iterator[httpx.Client]:
    """Their server on this daemon, and a client of it."""
    port, settings = free_port(), Path(folder, "opensandbox.toml")
    settings.write_text(_CONFIG.format(port=port, image=_STAND_IN, folder=folder))
    env = {**client_environment(engine), "OPENSANDBOX_INSECURE_SERVER": "YES"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [str(program), "--config", str(settings)]
    with (
        running(command, port, env=env, **silent),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        yield client


def _make_stand_in(engine: RawEngine, busybox: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in (("execd", busybox.read_bytes()), ("bootstrap.sh", _BOOTSTRAP.encode())):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    container = engine.run("skerry-test/busybox")
    try:
        engine.put(container, "/", made.getvalue())
        engine.commit(container, _STAND_IN)
    finally:
        engine.remove(container)
