"""A box with `network="rules"` has the walls of one without a network, and is prepared for the gate: whoever is in it
can listen on any port of its loopback, and what its programs look up is asked there."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from errno import ECONNREFUSED
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skerry.agent import bundle
from skerry.agent.client import AgentClient
from skerry.agent.network import AgentNetwork, Open, Resolve
from skerry.errors import Unsupported
from skerry.model.spec import new_id
from skerry.providers.base import Capability, Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite, make

_PORTABLE = "/.skerry/python"
_FIRST_FREE_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_LISTEN = """
import _socket, _thread, posix, sys
from errno import errorcode

listeners = []
for kind, address in ((2, ("127.0.0.1", 53)), (1, ("127.0.0.1", 53)), (1, ("127.200.0.2", 443))):
    listener = _socket.socket(2, kind)
    listener.bind(address)
    if kind == 1:
        listener.listen(5)
    listeners.append(listener)
print("listening", flush=True)
"""
_RESOLVE = """
asked = []

def serve():
    while True:
        query, address = listeners[0].recvfrom(512)
        end = query.index(0, 12) + 5
        asked.append(query[12 : end - 4])
        is_a = query[end - 4 : end - 2] == b"\\0\\1"
        answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4\\x7f\\xc8\\0\\2" if is_a else b""
        counts = b"\\0\\1" + (b"\\0\\1" if is_a else b"\\0\\0") + bytes(4)
        listeners[0].sendto(query[:2] + b"\\x81\\x80" + counts + query[12:end] + answer, address)

_thread.start_new_thread(serve, ())
found = {each[4] for each in _socket.getaddrinfo(b"name.of.a.test", 443, 0, 1)}
print(found == {("127.200.0.2", 443)}, b"\\4name\\2of\\1a\\4test\\0" in asked, flush=True)
client = _socket.socket(2, 1)
client.connect(found.pop())
print(listeners[2]._accept()[1] == client.getsockname(), flush=True)
posix._exit(0)  # the thread would need a library to end, which not every interpreter finds
"""
_REACH = """
import _socket, sys
from errno import errorcode

for family, kind, address in (
    (2, 1, ("203.0.113.1", 443)), (2, 2, ("203.0.113.1", 53)), (2, 1, ("10.0.0.1", 80)), (10, 1, ("2001:db8::1", 443)),
):
    try:
        reaching = _socket.socket(family, kind)
        reaching.settimeout(5)
        reaching.connect(address)
        print("reached", address)
    except OSError as error:
        print(errorcode.get(error.errno, error))
"""
_CALL_OUT = """
import _socket

client = _socket.socket(2, 1)
client.connect(_socket.getaddrinfo(b"name.of.a.test", 443, 0, 1)[0][4])
client.send(b"hello")
print(client.recv(100))
client.close()  # names are answered after it
try:
    _socket.getaddrinfo(b"another.test", 443, 0, 1)
except _socket.gaierror:
    print("no such name")
"""
_HIDE = """
import _socket

server = _socket.socket(2, 1)
server.bind(("0.0.0.0", 8443))
server.listen(5)
try:
    print(_socket.getaddrinfo(b"taken.test", 8443, 0, 1))
except _socket.gaierror:
    print("no such name")
"""
_ASK_LOOPBACK = """
import _socket

asking = _socket.socket(2, 1)
print(asking.connect_ex(("127.0.0.1", 53)))
"""
_PORTS = {"name.of.a.test": [443], "taken.test": [8443]}
_NO_WAY = {"ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "EAFNOSUPPORT"}
"""Ends of an attempt that are told at once: the second is gVisor's, the last two are those of a box without IPv6."""


async def _serve(network: AgentNetwork) -> None:
    """Be the gate of a box: what is sent to the one name that can be reached comes back in capitals."""
    async for wish in network.wishes():
        if isinstance(wish, Resolve):
            await network.resolved(wish.wish, _PORTS.get(wish.name, []))
        elif isinstance(wish, Open):
            assert (wish.name, wish.port) == ("name.of.a.test", 443)
            async with network.take(wish.wish) as tunnel:
                await tunnel.write((await tunnel.read()).upper())
                await tunnel.close_write()
                await tunnel.read()


class NetworkTests(Suite):
    async def _python(self, sandbox: AsyncSandbox, code: str) -> list[str]:
        """Run a program in a box, which need not have Python: our own interpreter is there then."""
        has_python = (await sandbox.exec("command -v python3")).ok
        argv = ["python3"] if has_python else bundle.portable_argv(_PORTABLE)
        done = await sandbox.exec([*argv, "-c", code], timeout_s=20)
        assert done.ok, done.stderr.decode()
        return done.text.splitlines()

    async def _skip_without_rules(self, provider: Provider) -> None:
        with suppress(Unsupported):
            if (await provider.enforcement(self.spec(provider, network="rules")))["network"].by:
                return
        with pytest.raises(Unsupported, match="network"):
            await make(self.spec(provider, network="rules"), provider)
        pytest.skip("this provider prepares no box for rules here, and has refused it")

    async def _is_prepared(self, sandbox: AsyncSandbox) -> bool:
        return await self._python(sandbox, _LISTEN + _RESOLVE) == ["listening", "True True", "True"]

    @pytest.mark.needs_real_unix
    async def test_with_rules_anybody_listens_on_low_ports_and_names_are_asked_there(self, provider: Provider) -> None:
        await self._skip_without_rules(provider)
        before = _FIRST_FREE_PORT.read_text() if _FIRST_FREE_PORT.exists() else ""
        async with self.box(provider, network="rules") as sandbox:
            assert "with loopback only; the gate lets through" in sandbox.enforced["network"].by
            assert await self._is_prepared(sandbox)
        assert not before or _FIRST_FREE_PORT.read_text() == before, "the host's own network was changed"

    @pytest.mark.needs_real_unix
    async def test_with_rules_connections_come_out_through_the_agent(self, provider: Provider) -> None:
        await self._skip_without_rules(provider)
        async with self.box(provider, network="rules") as sandbox:
            client = await AgentClient.greet(await provider.dial(sandbox.id))
            try:
                network = await AgentNetwork.open(client)
                serving = asyncio.ensure_future(_serve(network))
                assert await self._python(sandbox, _CALL_OUT) == ["b'HELLO'", "no such name"]
                assert await self._python(sandbox, _HIDE) == ["no such name"], "a server of the box is no other name"
                serving.cancel()
                await asyncio.wait([serving])
                network.close()
                await client.call("ping", type=dict[str, Any])
                assert await self._python(sandbox, _ASK_LOOPBACK) == [str(ECONNREFUSED)], "it ends with the gate"
            finally:
                client.close()

    @pytest.mark.needs_real_unix
    async def test_with_rules_there_is_only_loopback_and_nothing_else_is_reached(self, provider: Provider) -> None:
        await self._skip_without_rules(provider)
        async with self.box(provider, network="rules") as sandbox:
            cards = (await sandbox.exec(["cat", "/proc/net/dev"])).text.splitlines()[2:]
            assert {line.partition(":")[0].strip() for line in cards} <= {"lo", "tunl0", "sit0", "ip6tnl0"}
            assert (await sandbox.exec(["cat", "/proc/net/route"])).text.splitlines()[1:] == []
            ends = await self._python(sandbox, _REACH)
            assert len(ends) == 4
            assert set(ends) <= _NO_WAY

    @pytest.mark.needs_real_unix
    async def test_boxes_with_rules_share_no_loopback(self, provider: Provider) -> None:
        await self._skip_without_rules(provider)
        async with self.box(provider, network="rules") as first:
            code = f"{_LISTEN}\nsys.stdin.read()"
            argv = ["python3"] if (await first.exec("command -v python3")).ok else bundle.portable_argv(_PORTABLE)
            server = await first.start([*argv, "-c", code], stdin=True)
            assert await anext(aiter(server)) == (1, b"listening\n")
            for network in ("rules", "none"):
                async with self.box(provider, network=network) as second:
                    assert await self._python(second, _ASK_LOOPBACK) == [str(ECONNREFUSED)]
            await server.kill()

    @pytest.mark.needs_real_unix
    async def test_a_box_with_rules_stays_prepared_through_stop_pause_and_snapshot(self, provider: Provider) -> None:
        await self._skip_without_rules(provider)
        verbs: Any = provider
        name = f"conformance-{new_id()[:8]}"
        async with self.box(provider, network="rules") as sandbox:
            if Capability.PAUSE in provider.capabilities:
                await verbs.pause(sandbox.id)
                await verbs.resume(sandbox.id)
                if Capability.MEMORY in provider.capabilities:
                    await sandbox.close()
                    await verbs.sleep(sandbox.id)
                    await verbs.resume(sandbox.id)
                assert await self._is_prepared(sandbox)
            if Capability.STOP in provider.capabilities:
                await sandbox.close()
                await verbs.stop(sandbox.id)
                await verbs.start(sandbox.id, msgspec.structs.replace(sandbox.spec))
                assert await self._is_prepared(sandbox)
            if Capability.SNAPSHOT in provider.capabilities and "snapshot" in provider.honours:
                await verbs.snapshot(sandbox.id, name)
                try:
                    async with self.box(provider, network="rules", snapshot=name) as copy:
                        assert await self._is_prepared(copy)
                finally:
                    await verbs.remove_snapshot(name)
