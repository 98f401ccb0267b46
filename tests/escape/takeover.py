"""Ways of code in a box to become its agent, to speak as it or to it, and through it as another user of the box."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skerry.errors import AgentUnreachable
from skerry.providers.base import Capability, Provider
from skerry.providers.shared import layout, proc_socket
from skerry.sandbox.sandbox import AsyncSandbox

from .attempts import PYTHON
from .boxes import USERS, Boxes, Make, as_user

SEIZE = Path(__file__).with_name("seize.py")
LIE = {"LD_PRELOAD": "/home/user/evil.so", "BASH_ENV": "/home/user/evil.sh", "LATER": "from the box"}
SPEAK = """
import json, socket, sys
agent = socket.socket(socket.AF_UNIX)
agent.connect(sys.argv[1])
agent.settimeout(10)
for number, (method, params) in enumerate(json.loads(sys.argv[2]), 1):
    agent.sendall(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode() + b"\\n")
    print(agent.recv(65536).decode(), flush=True)
"""
Words = list[tuple[str, dict[str, Any]]]
SPOKEN: dict[str, Words] = {
    "after a greeting": [("hello", {"protocol": 1}), ("set_env", {"env": {"LIE": "told"}})],
    "in the plain dialect": [("exec", {"cmd": "touch lie"}), ("ping", {})],
}
STAND_IN = """
import os, socket, sys
os.unlink(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
print("up", flush=True)
while True:
    stream = listener.accept()[0]
    if stream.recv(65536):
        print("heard", flush=True)
"""


class TakeoverCases(Boxes):
    """The agent is the box's first process, and of its user."""

    python: ClassVar[Sequence[str]] = PYTHON
    own: ClassVar[frozenset[str]] = frozenset()
    """Ways into the agent that lead nowhere, on a kernel of the box's own."""
    debugs_by: ClassVar[frozenset[str]] = frozenset({"write its memory", "follow a descriptor"})
    """Ways into a process that is not the agent: without any, the probe would be blind."""

    async def seized(self, box: AsyncSandbox, pid: str) -> set[str]:
        """The ways of `seize.py` that led in."""
        await box.files.write("seize.py", SEIZE.read_bytes())
        done = await box.exec(f"{shlex.join(self.python)} seize.py {pid}", timeout_s=30)
        assert done.exit_code == 0, done.stderr.decode()
        results = dict(line.split(": ") for line in done.text.splitlines())
        assert results
        return {name for name, end in results.items() if end == "got in"}

    @USERS
    async def test_code_in_the_box_gets_nowhere_into_its_agent_but_into_its_own_processes(
        self, make: Make, user: str | None
    ) -> None:
        box = await make(as_user(user))
        found = await self.seized(box, "1") - self.own
        assert not found, found
        assert self.debugs_by <= await self.seized(box, "$$")

    async def test_what_a_box_s_agent_says_of_its_environment_never_reaches_its_root(
        self, make: Make, provider: Provider
    ) -> None:
        if Capability.USERS not in provider.capabilities:
            pytest.skip("all processes of its boxes are one user's")
        box = await make({"env": {"TOLD": "by the host"}})
        await box.set_env({"LATER": "by the host"})
        await box.call("set_env", {"env": LIE})  # as an agent would say that was taken over
        assert "LD_PRELOAD=" in (await box.exec(["env"])).text
        seen = (await box.exec(["env"], user="root")).text.splitlines()
        assert {"TOLD=by the host", "LATER=by the host"} <= set(seen)
        assert not [line for line in seen if line.startswith(("LD_PRELOAD=", "BASH_ENV=")) and not line.endswith("=")]


class SocketCases(TakeoverCases):
    """Where the agent listens on a socket among the files of the box."""

    hides_peers = False
    """Its kernel does not tell who is at the other end of a socket."""

    @pytest.mark.parametrize("words", SPOKEN.values(), ids=SPOKEN)
    async def test_code_in_the_box_is_not_heard_by_its_agent(self, box: AsyncSandbox, words: Words) -> None:
        done = await box.exec(["python3", "-c", SPEAK, layout.SOCKET, json.dumps(words)], timeout_s=30)
        if not self.hides_peers:
            assert "result" not in done.text
            assert "LIE" not in (await box.exec(["env"])).text
            assert not await box.files.exists("lie")
        assert (await box.exec(["echo", "alive"])).text == "alive\n"

    @pytest.fixture(params=["straight", "relay"])
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the socket among the files of a process of this host, or through a program that the engine starts."""

        async def refuse(_pid: int, _timeout_s: float) -> None:
            raise proc_socket.NotShared

        if request.param == "relay":
            monkeypatch.setattr(proc_socket, "connect", refuse)

    async def test_what_listens_in_the_place_of_the_agent_is_told_nothing(
        self, box: AsyncSandbox, provider: Provider, way: None
    ) -> None:
        await (await AsyncSandbox.open(box.id, provider)).close()
        if self.hides_peers:
            pytest.skip("its kernel does not tell who listens")
        stand_in = await box.start(["python3", "-c", STAND_IN, layout.SOCKET])
        said = aiter(stand_in)
        assert await anext(said) == (1, b"up\n")
        with pytest.raises(AgentUnreachable):
            await AsyncSandbox.open(box.id, provider)
        await stand_in.kill()
        assert [chunk async for chunk in said] == []
