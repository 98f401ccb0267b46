"""What the steps of a build can do on the real engines, told by the steps themselves and seen from the host."""

from __future__ import annotations

import asyncio
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engines.api import Refused, ask, ask_json
from engines.daemons import Daemon, Dockerd
from engines.images import load

from skerry.errors import InvalidSpec, ProviderError
from skerry.model.spec import Network
from skerry.providers.base import ImageBuild, Progress
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import EngineProvider, build_context, progress
from skerry.providers.podman import Podman

NAME = "skerry-test/walled"
BUSYBOX = "skerry-test/busybox"
SECURITY = Path(__file__).parents[3] / "SECURITY.md"
_PROVIDERS: dict[str, type[Docker] | type[Podman]] = {"docker": Docker, "podman": Podman}
_CAPABILITIES = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap",
    "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner",
    "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice",
    "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap",
)  # fmt: skip


def ignore(_: Progress) -> None:
    return


@pytest.fixture(params=["docker", "podman"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    found: Daemon = request.getfixturevalue(f"{request.param}_daemon")
    load(found.address, "busybox")
    yield found
    for image in ask_json(found.address, "GET", "/images/json"):
        for name in image["RepoTags"] or ():
            if NAME in name:
                ask(found.address, "DELETE", f"/images/{name}")


@pytest.fixture
def provider(daemon: Daemon, tmp_path: Path) -> EngineProvider:
    kind = _PROVIDERS[daemon.name]
    return kind(kind.Config(host=daemon.address, state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache")))


async def told_by(provider: EngineProvider, step: str, **settings: Any) -> list[str]:
    """What a RUN step prints."""
    told: list[str] = []
    build = ImageBuild(dockerfile=f"FROM {BUSYBOX}\nRUN {step}\n", name=NAME, no_cache=True, **settings)
    await provider.build_image(build, lambda progress: told.append(progress.message))
    return told


@contextmanager
def listening(address: str) -> Iterator[tuple[int, Callable[[], int]]]:
    """A service of the host's, and how many came to it."""
    with socket.create_server((address, 0)) as server:
        server.setblocking(False)

        def callers() -> int:
            count = 0
            while True:
                try:
                    server.accept()[0].close()
                except BlockingIOError:
                    return count
                count += 1

        yield server.getsockname()[1], callers


def host_addresses() -> set[str]:
    """Those that a step may know: of the host's own, of Docker's bridge, of Podman's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        return {"127.0.0.1", "172.17.0.1", "10.88.0.1", probe.getsockname()[0]}


def knock(port: int) -> str:
    each = " ".join(f"timeout 3 nc {address} {port} < /dev/null &" for address in sorted(host_addresses()))
    return f"{each} wait"


async def test_a_step_has_no_network_and_reaches_no_service_of_the_host(provider: EngineProvider) -> None:
    with listening("0.0.0.0") as (port, callers):
        told = await told_by(provider, f"echo has $(ls /sys/class/net); {knock(port)}; true")
        assert callers() == 0
    assert "has lo" in told


async def test_a_step_that_was_given_a_bridge_is_not_in_the_hosts_network(
    provider: EngineProvider, daemon: Daemon
) -> None:
    with listening("127.0.0.1") as (inner, inside), listening("0.0.0.0") as (outer, outside):
        step = f"echo has $(ls /sys/class/net); {knock(inner)}; {knock(outer)}; true"
        told = await told_by(provider, step, network=Network.BRIDGE)
        assert inside() == 0
        assert outside() > 0  # as SECURITY.md says of a bridge
    assert "has eth0 lo" in told


async def test_a_build_is_never_given_the_hosts_network() -> None:
    with pytest.raises(InvalidSpec, match="never the host's"):
        ImageBuild(dockerfile="FROM x", name=NAME, network=Network.HOST)


async def test_a_step_has_the_capabilities_that_the_page_says(provider: EngineProvider, daemon: Daemon) -> None:
    told = await told_by(provider, "grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; id -u")
    status = dict(re.split(r":\s+", line) for line in told if re.match(r"\w+:\s+\w+$", line))
    bits = int(status["CapEff"], 16)
    assert status["CapBnd"] == status["CapEff"]
    assert bits < 1 << len(_CAPABILITIES)
    names = sorted(name for bit, name in enumerate(_CAPABILITIES) if bits >> bit & 1)
    row = f"| `{daemon.name}` | {', '.join(names)} | {'yes' if status['NoNewPrivs'] == '1' else 'no'} |"
    assert row in SECURITY.read_text()
    assert status["Seccomp"] == "2"


async def test_a_step_has_the_memory_that_it_was_given(provider: EngineProvider) -> None:
    files = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"
    assert str(2 << 30) in await told_by(provider, f"cat {files} 2> /dev/null; true")
    with pytest.raises(ProviderError, match="64M of memory"):
        await told_by(provider, "dd if=/dev/zero of=/dev/null bs=200M count=1", memory=64 << 20)


async def test_a_step_that_fails_for_want_of_a_network_is_told_how_it_has_one(provider: EngineProvider) -> None:
    with pytest.raises(ProviderError, match=r"no network .--network bridge gives one"):
        await told_by(provider, "wget -T 2 http://127.0.0.1:1/")
    with pytest.raises(ProviderError) as caught:
        await provider.build_image(ImageBuild(dockerfile=f"FROM {BUSYBOX}\nCOPY none /\n", name=NAME), ignore)
    assert "--network" not in caught.value.message


async def test_a_step_that_never_stops_talking_has_an_end(
    provider: EngineProvider, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LONGEST_S", 4.0)
    with pytest.raises(ProviderError, match="longer than 4 s"):
        await told_by(provider, "while true; do echo on and on; sleep 0.1; done")
    deadline = time.monotonic() + 20
    while ask_json(daemon.address, "GET", "/containers/json", {"all": "1"}):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@contextmanager
def serving() -> Iterator[tuple[str, list[str]]]:
    """Something that only the host should read, and what was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"secret")

        def log_message(self, *_: Any) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "lines",
    [
        "ADD {url}/secret /",
        "ad\\\nd --chown=1:1 {url}/secret /",
        "ARG from={url}/secret\nADD $from /",
        'ADD ["{url}/secret", "/"]',
        'ADD "http:"//127.0.0.1:{port}/secret /',
        "ADD http:\\//127.0.0.1:{port}/secret /",
        'ADD ["http\\u003a//127.0.0.1:{port}/secret", "/"]',
        "RUN true \\\n  # not a comment everywhere\nADD {url}/secret /",
        "RUN true \\\n\nADD {url}/secret /",
        "FROM {busybox} AS first\nONBUILD ADD {url}/secret /\nFROM first",
        "# escape=`\nAD`\nD {url}/secret /",
    ],
)
async def test_the_engine_fetches_nothing_for_a_build_without_a_network(provider: EngineProvider, lines: str) -> None:
    with serving() as (url, asked):
        text = f"FROM {BUSYBOX}\n{lines.format(url=url, port=url.rpartition(':')[2], busybox=BUSYBOX)}\n"
        with pytest.raises(InvalidSpec, match=r"ADD|escape"):
            await provider.build_image(ImageBuild(dockerfile=text, name=NAME), ignore)
        assert asked == []


@pytest.mark.parametrize(
    "lines",
    [
        "RUN --mount=type=bind,from=0,source=/link,target=/host ls /host",
        "run \\\n  --mount=type=bind,from=0,source=/link,target=/host ls /host",
        "RUN --network=host ls /sys/class/net",
        "ONBUILD RUN --mount=type=bind,from=0,source=/link,target=/host ls /host\nFROM 1",
    ],
)
async def test_a_step_cannot_choose_its_mounts_or_its_network(provider: EngineProvider, lines: str) -> None:
    """A link in one stage that another mounts has led to the host's root."""
    told: list[str] = []
    text = f"FROM {BUSYBOX}\nRUN ln -s / /link\nFROM {BUSYBOX}\n{lines}\n"
    with pytest.raises(InvalidSpec, match="RUN --"):
        await provider.build_image(ImageBuild(dockerfile=text, name=NAME), lambda each: told.append(each.message))
    assert told == []


async def test_an_image_to_build_on_is_not_looked_for_elsewhere_without_a_network(provider: EngineProvider) -> None:
    with listening("127.0.0.1") as (port, callers):
        there = f"127.0.0.1:{port}/x"
        for text in (f"\ufeffFROM {there}", f"FROM {BUSYBOX}\nCOPY --from={there} / /"):
            with pytest.raises(ProviderError, match="skerry image pull"):
                await provider.build_image(ImageBuild(dockerfile=text, name=NAME), ignore)
        for flag in (f"--fr\\om={there}", f'--"from"={there}', f"--chown=1:1 --from='{there}'"):
            text = f"FROM {BUSYBOX}\nCOPY {flag} / /"
            with pytest.raises(InvalidSpec, match="flags without quotes"):
                await provider.build_image(ImageBuild(dockerfile=text, name=NAME), ignore)
        assert callers() == 0


@pytest.mark.parametrize("daemon", ["docker"], indirect=True)  # Podman keeps them from whoever asks
async def test_steps_that_a_base_image_brings_along_are_not_run(provider: EngineProvider, daemon: Daemon) -> None:
    first = ImageBuild(dockerfile=f"FROM {BUSYBOX}\nONBUILD RUN echo unread\n", name=NAME)
    await provider.build_image(first, ignore)
    for text in (f"FROM {NAME}", f"ARG B={NAME}\nFROM ${{B}} AS one", f"FROM --platform=linux/amd64 {NAME}:latest"):
        with pytest.raises(InvalidSpec, match="ONBUILD"):
            await provider.build_image(ImageBuild(dockerfile=f"{text}\nRUN true\n", name=f"{NAME}-2"), ignore)
    with pytest.raises(Refused):
        ask(daemon.address, "GET", f"/images/{NAME}-2/json")


async def test_what_is_larger_than_the_host_takes_is_not_written(provider: EngineProvider, tmp_path: Path) -> None:
    """A file with holes costs a step nothing."""
    build = ImageBuild(dockerfile=f"FROM {BUSYBOX}\nRUN truncate -s 64M /holes\n", name=NAME)
    target = tmp_path / "archive"
    with pytest.raises(ProviderError, match="larger than 8M"):
        await provider.build_archive(build, target, ignore, most=8 << 20)
    assert target.stat().st_size <= 8 << 20


class OnGvisor(Dockerd):
    settings: ClassVar = {"default-runtime": "runsc"}


async def test_steps_run_in_gvisor_where_that_is_the_runtime_of_all_of_docker(gvisor: str, tmp_path: Path) -> None:
    daemon = OnGvisor()
    try:
        daemon.start()
        load(daemon.address, "busybox")
        told = await told_by(Docker(Docker.Config(host=daemon.address, state_dir=str(tmp_path))), "dmesg")
    finally:
        daemon.stop()
    assert any("Starting gVisor" in line for line in told)


def test_the_images_that_a_dockerfile_needs_are_known_before_it_is_built() -> None:
    text = (
        "ARG TAG=12\nARG BASE=debian:$TAG\nFROM ${BASE} AS first\nRUN true\nFROM scratch\nCOPY --from=first /a /\n"
        "COPY --from=tools:1 /b /\nCOPY --from=0 /c /\nFROM FIRST as last\nFROM other\n"
    )
    assert build_context.base_images(text, {}, None) == ["debian:12", "other", "tools:1"]
    assert build_context.base_images(text, {"TAG": "13"}, "last") == ["debian:13", "tools:1"]
    with pytest.raises(InvalidSpec, match="known before"):
        build_context.base_images("ARG A\nFROM ${A:-x}\n", {}, None)


def test_what_a_dockerfile_may_have_is_left_alone() -> None:
    text = (
        "FROM x\nADD a.tar /\nCOPY --chown=1:1 'a b' /\nCOPY --from=y / /\nRUN echo ADD http://x\n"
        "RUN npm \\\n run --silent\n# ADD http://x\n"
    )
    build_context.check_dockerfile(text, Network.NONE)
    build_context.check_dockerfile(f"{text}ADD https://host/file /\n", Network.BRIDGE)
