"""Code that wants more than its rules: each attempt comes to nothing, or is bounded, and leaves its line in the ledger.
The witness is the little internet itself, which notes who reached it."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import signal
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import pytest
from engines.daemons import Daemon
from manager.world import until

from skerry.config import Config
from skerry.ledger.verify import verify
from skerry.manager.manager import AsyncSandboxManager
from skerry.sandbox.sandbox import AsyncSandbox

from . import inside
from .installation import gate, host_root, installed, is_usr_merged, lines
from .world import World

pytestmark = pytest.mark.timeout(120)

PROXY = ("127.200.0.1", 3128)
NXDOMAIN = {"failed": "gaierror"}


class Attacker:
    """Code in a box with a few rules, and what the host has written down of it."""

    def __init__(self, sandbox: AsyncSandbox, world: World, config: Config) -> None:
        self.sandbox = sandbox
        self.world = world
        self.config = config

    async def try_all(self, *attempts: tuple[Any, ...]) -> list[dict[str, Any]]:
        done = await self.sandbox.exec(["python3", "-c", SOURCE, json.dumps(attempts)], timeout_s=60)
        assert done.ok, done.stderr.decode()
        found: list[dict[str, Any]] = json.loads(done.text)
        return found

    async def try_one(self, *attempt: Any) -> dict[str, Any]:
        (found,) = await self.try_all(attempt)
        return found

    async def ask_proxy(self, request: str, encoding: str = "utf-8") -> str:
        """The first line that the proxy answers with; empty if it hangs up."""
        answer = await self.try_one("send", *PROXY, base64.b64encode(request.encode(encoding)).decode())
        return str(answer.get("got", "")).partition("\r\n")[0]

    def lines(self) -> list[dict[str, Any]]:
        """Lines of the ledger about this box."""
        return [line for line in lines(self.config.state_dir) if line.get("sandbox") == self.sandbox.id]

    @asynccontextmanager
    async def leaves_a_line(self, *words: str, kinds: Collection[str] = ("refuse", "resolve")) -> AsyncIterator[None]:
        """What is done meanwhile has to leave a new line of one of these kinds, with all these words in it."""
        before = {line["seq"] for line in self.lines()}

        async def is_there() -> bool:
            new = [line for line in self.lines() if line["seq"] not in before and line["kind"] in kinds]
            return any(all(word in json.dumps(line, ensure_ascii=False) for word in words) for line in new)

        yield
        await until(is_there)


SOURCE = Path(inside.__file__).read_text()


@pytest.fixture(scope="module")
def config(world: World, local_rules: None) -> Iterator[Config]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="skerry-gate-", dir="/tmp")))
        folder.chmod(0o755)
        yield stack.enter_context(installed(folder, world))


@pytest.fixture(scope="module")
async def manager(config: Config) -> AsyncIterator[AsyncSandboxManager]:
    async with AsyncSandboxManager(config) as manager:
        yield manager
        await manager.destroy_all()


@pytest.fixture(scope="module")
async def attacker(manager: AsyncSandboxManager, world: World, config: Config) -> Attacker:
    allow = [
        *(world.rule("web.test", service) for service in ("http", "https")),
        world.rule("*.wild.test", "http"),
        world.rule("xn--bcher-kva.test", "http"),
        world.rule("raw.test", "echo"),
    ]
    sandbox = await manager.create(allow=allow, deny=[world.rule("bad.wild.test", "http")])
    return Attacker(sandbox, world, config)


@pytest.mark.parametrize(
    "name",
    [
        "other.test", "wild.test", "bad.wild.test", "web.test.other.test", "evilweb.test", "aweb.test", "web.tes",
        "web.testt", "test", "w\u0435b.test", "xn--bchr-kva.test", "localhost.web.test", "metadata.google.internal",
        "WILD2.Test", "other2.test.", "b\u00fccher.test.other.test",
    ],
)  # fmt: skip
async def test_a_name_that_no_rule_allows_does_not_exist(attacker: Attacker, name: str) -> None:
    spelled = name.encode("idna").decode().lower().removesuffix(".")
    async with attacker.leaves_a_line(f'"name": "{spelled}"', kinds=["resolve"]):
        assert await attacker.try_one("resolve", name) == NXDOMAIN


async def test_a_name_is_the_same_in_every_spelling(attacker: Attacker) -> None:
    names = ["web.test", "WEB.Test", "web.test.", "b\u00fccher.test", "xn--bcher-kva.test", "a.wild.test"]
    answers = await attacker.try_all(*(("resolve", name) for name in names))
    assert all(answer["got"][0].startswith("127.200.") for answer in answers), answers
    assert answers[0] == answers[1] == answers[2]
    assert answers[3] == answers[4]


async def test_nothing_is_told_of_a_name_but_its_address(attacker: Attacker) -> None:
    """Its IPv6 addresses, mail servers and texts would be another's, and could carry something."""
    kinds = {"AAAA": 28, "TXT": 16, "MX": 15, "NS": 2, "ANY": 255, "HTTPS": 65}
    for transport in ("udp", "tcp"):
        answers = await attacker.try_all(*(("ask", "web.test", kind, transport) for kind in kinds.values()))
        assert [answer["got"]["answers"] for answer in answers] == [0] * len(kinds)
    assert await attacker.try_one("resolve", "web.test", "6") == NXDOMAIN


@pytest.mark.parametrize("port", ["ssh", "postgres", "greet"])
async def test_another_port_of_an_allowed_name_is_refused(attacker: Attacker, port: str) -> None:
    number = attacker.world.ports[port]
    assert await attacker.try_one("send", "web.test", number, "") == {"failed": "ConnectionRefusedError"}
    async with attacker.leaves_a_line(f"no rule allows web.test on port {number}"):
        assert "403" in await attacker.ask_proxy(f"CONNECT web.test:{number} HTTP/1.1\r\nHost: web.test\r\n\r\n")


LITERALS = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "127.0.0.1.", "0",
    "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
    "[fe80::1%25lo]", "169.254.169.254", "[fd00:ec2::254]", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "localhost", "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u2460.1.1.1",
]  # fmt: skip


@pytest.mark.parametrize("host", LITERALS)
@pytest.mark.parametrize("request_line", ["CONNECT {host}:{port}", "GET http://{host}:{port}/hello"])
async def test_an_address_is_refused_however_it_is_spelled(attacker: Attacker, host: str, request_line: str) -> None:
    port, before = attacker.world.ports["http"], len(attacker.world.seen())
    text = f"{request_line.format(host=host, port=port)} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
    told = plainly(host) if host.isascii() else "proxy"  # what is no request that could be read names no host
    async with attacker.leaves_a_line(told, kinds=["refuse"]):
        assert "HTTP/1.1 4" in await attacker.ask_proxy(text)
    assert len(attacker.world.seen()) == before


def plainly(host: str) -> str:
    """An address in its one spelling; other text as it is, but for a dot at its end."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.strip("[]").removesuffix(".")
    return str(getattr(address, "ipv4_mapped", None) or address)


async def test_addresses_of_the_host_and_its_networks_are_not_there(attacker: Attacker) -> None:
    port = attacker.world.ports["http"]
    places = ["127.0.0.1", "169.254.169.254", "10.0.0.1", "8.8.8.8"]
    answers = await attacker.try_all(*(("send", place, port, "") for place in places))
    assert all("failed" in answer for answer in answers), answers


async def test_a_server_of_the_box_is_not_reached_under_another_name(
    manager: AsyncSandboxManager, world: World, config: Config
) -> None:
    port = world.ports["echo"]
    sandbox = await manager.create(allow=[world.rule("raw.test", "echo")])
    serve = f"import socket, sys; held = socket.create_server(('', {port})); print(flush=True); sys.stdin.read()"
    server = await sandbox.start(["python3", "-c", serve], stdin=True)
    await anext(aiter(server))
    attacker = Attacker(sandbox, world, config)
    async with attacker.leaves_a_line('"name": "raw.test"', f"a program of the box has port {port}"):
        assert await attacker.try_one("send", "raw.test", port, "") == NXDOMAIN
    await manager.destroy(sandbox.id)


async def test_udp_goes_nowhere(attacker: Attacker) -> None:
    answers = await attacker.try_all(("udp", "8.8.8.8", 53), ("udp", "10.0.0.1", 53), ("udp", "127.0.0.1", 123))
    assert all("failed" in answer for answer in answers), answers


async def test_tls_for_another_name_is_refused(attacker: Attacker) -> None:
    port = attacker.world.ports["https"]
    assert str((await attacker.try_one("tls", "web.test", port, "web.test")).get("got")).startswith("TLS")
    async with attacker.leaves_a_line("the TLS greeting names other.test, and web.test was asked for"):
        assert "failed" in await attacker.try_one("tls", "web.test", port, "other.test")
    assert not any(each.get("sni") == "other.test" for each in attacker.world.seen())


async def test_a_request_for_another_host_is_refused(attacker: Attacker) -> None:
    request = base64.b64encode(b"GET /hello HTTP/1.1\r\nHost: other.test\r\n\r\n").decode()
    async with attacker.leaves_a_line("the request is for other.test, and web.test was asked for"):
        answer = await attacker.try_one("send", "web.test", attacker.world.ports["http"], request)
    assert "hello from" not in str(answer)
    assert "other.test" not in attacker.world.hosts_seen()


@pytest.mark.parametrize("first", ["CONNECT other.test:443", "GET http://other.test/hello"])
async def test_a_proxy_behind_an_allowed_name_is_no_way_out(attacker: Attacker, first: str) -> None:
    request = base64.b64encode(f"{first} HTTP/1.1\r\nHost: other.test\r\n\r\n".encode()).decode()
    async with attacker.leaves_a_line('"name": "web.test"', kinds=["refuse"]):
        answer = await attacker.try_one("send", "web.test", attacker.world.ports["http"], request)
    assert str(answer.get("got")).startswith("HTTP/1.1 4"), answer
    assert "other.test" not in attacker.world.hosts_seen()


SMUGGLED = [
    "GET http://web.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n"
    "GET http://other.test:{http}/hello HTTP/1.1\r\nHost: other.test\r\n\r\n",
    "GET http://other.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "GET http://web.test:{http}@other.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "GET http://other.test:{http}#@web.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "GET http://other.test:{http}\\@web.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "GET http://web.test:{http}/hello HTTP/1.1\r\nHost: other.test\r\nHost: web.test\r\n\r\n",
    "POST http://web.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\nContent-Length: 4\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /hello HTTP/1.1\r\nHost: other.test\r\n\r\n",
    "POST http://web.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\n"
    "GET /hello HTTP/1.1\r\nHost: other.test\r\nConnection: close\r\n\r\n",
    "GET http://web.test:{http}/hello HTTP/1.1\r\nHost : web.test\r\nX: a\r\n Host: other.test\r\n\r\n",
    "CONNECT web.test:{http} HTTP/1.1\r\nHost: other.test:{http}\r\n\r\n"
    "GET /hello HTTP/1.1\r\nHost: other.test\r\n\r\n",
    "CONNECT web.test:{http}\r\n\r\nCONNECT other.test:{http} HTTP/1.1\r\n\r\n",
    "CONNECT other.test:{http} HTTP/1.1\r\nHost: web.test:{http}\r\n\r\n",
    "CONNECT web.test:{http}:{http} HTTP/1.1\r\n\r\n",
    "CONNECT web.test.:0{http} HTTP/1.1\r\n\r\nGET /hello HTTP/1.1\r\nHost: other.test\r\n\r\n",
    "CONNECT web.test\0.other.test:{http} HTTP/1.1\r\n\r\n",
    "CONNECT web.test%2eother.test:{http} HTTP/1.1\r\n\r\n",
    "GET /hello HTTP/1.1\r\nHost: other.test:{http}\r\n\r\n",
    "GET ftp://other.test:{http}/hello HTTP/1.1\r\nHost: web.test\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


@pytest.mark.parametrize("request_text", SMUGGLED, ids=range(len(SMUGGLED)))
async def test_nothing_is_smuggled_through_the_proxy(attacker: Attacker, request_text: str) -> None:
    data = request_text.format(http=attacker.world.ports["http"])
    async with attacker.leaves_a_line(kinds=["refuse"]):
        await attacker.try_one("pour", *PROXY, base64.b64encode(data.encode("latin-1")).decode())
    assert "other.test" not in attacker.world.hosts_seen()


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:{http}/hello", "http://10.0.0.1/", "http://other.test:{http}/hello"]
)
async def test_a_redirect_leads_nowhere_else(attacker: Attacker, place: str) -> None:
    target = place.format(**attacker.world.ports)
    page = f"http://web.test:{attacker.world.ports['http']}/redirect?to={target}"
    async with attacker.leaves_a_line(str(urlsplit(target).hostname), kinds=["refuse"]):
        by_proxy = await attacker.sandbox.exec(f"curl -sSL --max-time 20 --noproxy '' '{page}'")
    direct = await attacker.sandbox.exec(f"env -u http_proxy -u HTTP_PROXY curl -sSL --max-time 20 '{page}'")
    for done in (by_proxy, direct):
        assert b"hello from" not in done.stdout
        assert attacker.world.hosts_seen().isdisjoint({"other.test", "127.0.0.1", "10.0.0.1"})


async def test_a_flood_of_connections_is_bounded_and_holds_up_nobody_else(
    attacker: Attacker, manager: AsyncSandboxManager
) -> None:
    port, hello = attacker.world.ports["echo"], base64.b64encode(b"hello\n").decode()
    sandbox = await manager.create(allow=[attacker.world.rule("raw.test", "echo")])
    flooding = Attacker(sandbox, attacker.world, attacker.config)
    async with flooding.leaves_a_line("more than 512 connections at once", kinds=["refuse"]):
        flood, answer = await asyncio.gather(
            flooding.try_one("flood", "raw.test", port, 700), attacker.try_one("send", "raw.test", port, hello)
        )
    assert 0 < flood["got"]["answered"] <= 512
    assert answer == {"got": "hello\n"}

    async def has_room() -> bool:
        return await flooding.try_one("send", "raw.test", port, hello) == {"got": "hello\n"}

    await until(has_room)  # soon again
    await manager.destroy(sandbox.id)


async def test_a_body_of_a_byte_a_second_holds_up_nothing(attacker: Attacker) -> None:
    port = attacker.world.ports["http"]
    slow = await attacker.sandbox.start(["curl", "-sN", f"http://web.test:{port}/drip?bytes=1000"])
    await anext(aiter(slow))
    async with attacker.leaves_a_line('"name": "web.test"', kinds=["close"]):
        answer = await attacker.sandbox.exec(["curl", "-fsS", f"http://web.test:{port}/hello"])
    assert answer.text == "hello from web.test\n"
    async with attacker.leaves_a_line('"name": "web.test"', '"down": ', kinds=["close"]):
        await slow.kill()


async def test_without_a_gate_nothing_gets_out_and_the_next_one_takes_over(
    attacker: Attacker, config: Config, world: World
) -> None:
    port, hello = world.ports["echo"], base64.b64encode(b"hello\n").decode()
    held = await attacker.sandbox.start(["python3", "-c", SOURCE, json.dumps([["hold", "raw.test", port]])])
    output = aiter(held)
    assert b"open" in (await anext(output))[1]
    killed = gate(config.state_dir)
    os.kill(killed.pid, signal.SIGKILL)
    ended = b"".join([data async for _, data in output])
    assert json.loads(ended) in ([{"got": ""}], [{"failed": "ConnectionResetError"}])
    assert "failed" in await attacker.try_one("send", "web.test", world.ports["http"], hello)
    async with AsyncSandboxManager(config):  # whoever opens the registry
        assert await attacker.try_one("send", "raw.test", port, hello) == {"got": "hello\n"}
    following = gate(config.state_dir).pid
    assert following != killed.pid
    gates = [(line["event"], line["pid"]) for line in lines(config.state_dir) if line["kind"] == "gate"]
    assert gates[-2:] == [("start", killed.pid), ("start", following)]  # the first has no end
    assert verify(Path(config.state_dir, "ledger")).is_whole


async def test_a_rule_that_is_taken_back_ends_what_it_allowed(attacker: Attacker, manager: AsyncSandboxManager) -> None:
    world = attacker.world
    sandbox = await manager.create(allow=[world.rule("raw.test", "echo")])
    attempt = json.dumps([["hold", "raw.test", world.ports["echo"]]])
    held = await sandbox.start(["python3", "-c", SOURCE, attempt])
    output = aiter(held)
    assert b"open" in (await anext(output))[1]
    async with Attacker(sandbox, world, attacker.config).leaves_a_line("the rules changed", kinds=["close"]):
        await sandbox.network.set(allow=[])
    ended = b"".join([data async for _, data in output])
    assert json.loads(ended) in ([{"got": ""}], [{"failed": "ConnectionResetError"}])
    assert await Attacker(sandbox, world, attacker.config).try_one("resolve", "raw.test") == NXDOMAIN
    await manager.destroy(sandbox.id)


HOOK = """
import itertools, socket
real = socket.getaddrinfo
rebinding = itertools.cycle(["127.0.0.2", "127.0.0.1"])
answers = {"inner.test": ["127.0.0.1"], "mixed.test": ["1.1.1.1", "127.0.0.1"], "mapped.test": ["::ffff:127.0.0.1"],
           "metadata.test": ["169.254.169.254"]}

def answer(name, *words, **more):
    if name == "rebind.test":
        return real(next(rebinding), None, type=socket.SOCK_STREAM)
    if name in answers:
        return [entry for address in answers[name] for entry in real(address, None, type=socket.SOCK_STREAM)]
    return real(name, *words, **more)

socket.getaddrinfo = answer
"""


@pytest.mark.usefixtures("local_rules")
async def test_names_that_lead_into_the_host_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One private address among an owner's answers is enough. The resolver of this gate says what its owner wants."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["inner.test", "mixed.test", "mapped.test", "metadata.test"]
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        config = stack.enter_context(installed(Path(folder), world))
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(allow=[world.rule(name, "http") for name in names])
            attacker = Attacker(sandbox, world, config)
            request = base64.b64encode(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n").decode()
            answers = await attacker.try_all(*(("send", name, world.ports["http"], request) for name in names))
            assert "hello from" not in json.dumps(answers)
            for name in names:
                port = world.ports["http"]
                assert "HTTP/1.1 403" in await attacker.ask_proxy(f"CONNECT {name}:{port} HTTP/1.1\r\n\r\n")
            told = {line["name"]: line["reason"] for line in attacker.lines() if line["kind"] == "refuse"}
            assert all("not an address of the internet" in told[name] for name in names), told
            await manager.destroy(sandbox.id)


@pytest.mark.usefixtures("local_rules")
async def test_an_answer_that_changes_after_the_check_leads_nowhere(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two answers in turn the first may be reached, where nobody listens. Who asked again to connect would get the
    second, and reach what no rule allows."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    port, before = world.ports["echo"], len(world.seen())
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        config = stack.enter_context(installed(Path(folder), world))
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(allow=[f"rebind.test:{port}", f"127.0.0.2:{port}"])
            attacker = Attacker(sandbox, world, config)
            hello = base64.b64encode(b"hello\n").decode()
            async with attacker.leaves_a_line("rebind.test"):
                answers = await attacker.try_all(*[("send", "rebind.test", port, hello)] * 4)
            assert all("failed" in answer or answer["got"] == "" for answer in answers), answers
            assert len(world.seen()) == before  # nobody even connected
            await manager.destroy(sandbox.id)


async def test_the_same_is_refused_in_a_container(world: World, docker_daemon: Daemon) -> None:
    if not is_usr_merged():
        pytest.skip("the programs of this host are not all below /usr, which these boxes have theirs from")
    port, image = world.ports["http"], "skerry-test/hostile:1"
    connect = base64.b64encode(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode()).decode()
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        settings = {"host": docker_daemon.address, "cache_dir": f"{folder}/cache"}
        config = stack.enter_context(installed(Path(folder), world, "docker", settings))
        async with AsyncSandboxManager(config) as manager:
            await manager.import_image(host_root(Path(folder, "root.tar")), image)
            try:
                sandbox = await manager.create(
                    image=image, mounts=["/usr:/usr:ro"], data=False, allow=[world.rule("web.test", "http")]
                )
                attacker = Attacker(sandbox, world, config)
                known, *refused, told = await attacker.try_all(
                    ("resolve", "WEB.test."),
                    ("resolve", "other.test"),
                    ("resolve", "web.test", "6"),
                    ("send", "web.test", world.ports["echo"], ""),
                    ("send", "127.0.0.1", port, ""),
                    ("send", "169.254.169.254", 80, ""),
                    ("udp", "8.8.8.8", 53),
                    ("send", *PROXY, connect),
                )
                wanted = {"no rule allows other.test", f"no rule allows 127.0.0.1 on port {port}"}

                async def are_told() -> bool:  # who was refused may hear of it before the line is there
                    told = {line["reason"] for line in attacker.lines() if line["kind"] in ("refuse", "resolve")}
                    return told == wanted

                await until(are_told)
            finally:
                await manager.destroy_all()
                await manager.remove_image(image, force=True)
    assert known["got"][0].startswith("127.200.")
    assert all("failed" in answer for answer in refused), refused
    assert told["got"].startswith("HTTP/1.1 403")
