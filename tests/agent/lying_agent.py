"""An agent that says whatever a test wants, in memory: no process, no socket, no time passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from skerry.agent.client import AgentClient
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.net.stream import Buffer, Receiver, Stream
from skerry.sandbox.sandbox import AsyncSandbox

from .no_boxes import NoBoxes

Message = dict[str, Any]
Script = Callable[["LyingAgent", Message], None]

HELLO = {"protocol": 1, "agent": "0.1.0", "pid": 1, "started": 0.0}
EXIT = {"exit_code": 0, "signal": None, "timed_out": False, "truncated": False, "duration_s": 0.1}
ENTRY = {"name": "x", "path": "/x", "type": "file", "size": 1, "mode": 0o644, "uid": 0, "gid": 0, "mtime": 0.0}


def silent(_agent: LyingAgent, _message: Message) -> None:
    pass


class LyingAgent(Stream):
    """The host's stream and the agent behind it; `script` is called with each message that the host sends."""

    def __init__(self, script: Script = silent) -> None:
        self.script = script
        self.messages: list[Message] = []
        self.uploaded = 0
        self._receiver: Receiver | None = None
        self._missing = 0

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, *parts: Buffer) -> None:
        if not self.is_open:
            return
        for part in parts:
            if self._missing:
                self.uploaded += len(part)
                self._missing -= len(part)
            else:
                self._on_line(bytes(part))

    def _on_line(self, line: bytes) -> None:
        message = json.loads(line)
        self._missing = message.get("bytes", 0)
        self.messages.append(message)
        loop = asyncio.get_running_loop()
        if message["method"] == "hello":
            loop.call_soon(self.answer, message, HELLO)
        else:
            loop.call_soon(self.script, self, message)

    async def drained(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.end(None)

    def end(self, error: Exception | None = None) -> None:
        if self.is_open:
            self.is_open = False
            assert self._receiver is not None
            self._receiver.closed(error)

    # what it says

    def raw(self, data: bytes) -> None:
        assert self._receiver is not None
        if self.is_open:
            self._receiver.received(memoryview(data))

    def send(self, message: Message, attachment: bytes = b"") -> None:
        self.raw(json.dumps(message).encode() + b"\n" + attachment)

    def data(self, id: int, content: bytes, fd: Any = 1) -> None:
        self.send({"method": "data", "params": {"id": id, "fd": fd}, "bytes": len(content)}, content)

    def answer(self, message: Message, result: Any) -> None:
        self.send({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def asked(self, method: str) -> list[Message]:
        return [message for message in self.messages if message["method"] == method]


class LyingProvider(NoBoxes):
    """Boxes that are nothing but a lying agent."""

    name = "lying"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.agents: list[LyingAgent] = []

    async def dial(self, id: SandboxId) -> Stream:
        self.agents.append(LyingAgent(self.script))
        return self.agents[-1]


def sandbox_of(script: Script, disk: int | None = None) -> AsyncSandbox:
    """A sandbox, ready, whose agent follows the script."""
    return AsyncSandbox.of_box(new_id(), Spec(provider="lying", disk=disk), LyingProvider(script))


def requests_only(script: Script) -> Script:
    """The script, for requests; notifications (credit, cancel, data) pass unheard."""
    return lambda agent, message: script(agent, message) if "id" in message else None


async def client_of(script: Script = silent) -> tuple[AgentClient, LyingAgent]:
    agent = LyingAgent(script)
    return await AgentClient.greet(agent), agent


async def turns(count: int = 20) -> None:
    """Let the loop work off what is scheduled."""
    for _ in range(count):
        await asyncio.sleep(0)
