"""Calls of a relayed stream: what each method needs, does, and tells the ledger."""

from __future__ import annotations

import base64
import os
from typing import Annotated, Any, TypeVar

import msgspec

from skerry.agent.client import AgentClient
from skerry.errors import AgentProtocolError, InvalidSpec, NotFound
from skerry.ledger.facts import NOT_TOLD, Command
from skerry.model.tenants import Scope
from skerry.sandbox.processes import MAX_COMMAND, Exit, open_command
from skerry.sandbox.sandbox import SHELL
from skerry.surfaces.rest.relayed_call import WINDOW, RelayedCall

T = TypeVar("T")


class _Command(msgspec.Struct, frozen=True):
    """The part of a command's params that is ours to look at."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    env: dict[str, str] | None = None
    cwd: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    background: bool = False
    pty: dict[str, Any] | None = None
    limit: int | None = None
    language: str | None = None
    tag: str | None = None
    more: int = 0


class _Started(msgspec.Struct):
    process: int = 0


class _Exec(RelayedCall):
    """`exec` and `exec_code`: told before they run, and when they end."""

    scope = Scope.EXEC

    async def work(self) -> Any:
        params = await self._whole()
        asked = _read(params, _Command)
        user = asked.user or self.relay.user
        connection = self.sandbox.connection
        connect, named = connection.of_user(user, self.sandbox.spec.user, background=asked.background)
        params = {name: value for name, value in params.items() if name != "user"}
        if named is not None:
            params["user"] = named
        told = self._tell(asked, user)
        with told.failing():
            self.client = await connect()
            call = await open_command(self.client, self.method, params, self.attachment, window=WINDOW)
            raw = await self.follow(call)
            if asked.background:
                self.relay.has_started(_answer(raw, _Started).process, told)
            else:
                told.end(_answer(raw, Exit).result())
        return raw

    async def _whole(self) -> dict[str, Any]:
        """The params, with those that were too long for a line; of code, all of it is the attachment then."""
        more = self.params.pop("more", 0)
        if not isinstance(more, int) or not 0 <= more <= MAX_COMMAND:
            raise InvalidSpec("command: it is too long", field="command")
        whole = bytearray(self.attachment)
        size = len(whole) + more
        while len(whole) < size:
            piece = await self.next_up()
            if piece is None:
                raise InvalidSpec("command: it was cut short", field="command")
            whole += piece
        self.give_back(bytes(whole[size:]))
        self.attachment = bytes(whole[:size])
        if self.method == "exec_code" or not self.attachment:
            return self.params
        try:
            long = msgspec.json.decode(self.attachment, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"command: {error}", field="command") from None
        self.attachment = b""
        return {**self.params, **{name: long[name] for name in ("argv", "shell", "env") if name in long}}

    def _tell(self, asked: _Command, user: str | None) -> Command:
        facts = {**msgspec.structs.asdict(asked), "user": user}
        command = asked.argv if asked.argv is not None else asked.shell
        if self.method == "exec_code":
            how, command, facts["size"] = "code", None, len(self.attachment)
        elif asked.pty is not None:
            how, command = "terminal", None if command == SHELL else command
        else:
            how = "start" if asked.limit is None else "exec"
        return Command.begin(self.relay.ledger, self.sandbox.id, how, command, facts)


class _Attach(RelayedCall):
    """`attach`: the end of a process that this stream began is told when it is known."""

    scope = Scope.EXEC

    async def work(self) -> Any:
        raw = await super().work()
        number = self.params.get("process")
        told = self.relay.started.pop(number, NOT_TOLD) if isinstance(number, int) else NOT_TOLD
        told.end(_answer(raw, Exit).result())
        return raw


class _Interpret(RelayedCall):
    """A call about an interpreter: what is run is told. How it ends the client alone knows: its stream has no end."""

    scope = Scope.EXEC

    async def work(self) -> Any:
        if self.params.get("op") != "run":
            return await super().work()
        more = self.params.get("more", 0)
        size = len(self.attachment) + (more if isinstance(more, int) else 0)
        told = Command.begin(self.relay.ledger, self.sandbox.id, "code", None, {"size": size})
        with told.failing():
            raw = await super().work()
        told.leave()
        return raw


class _OfCall(RelayedCall):
    """`signal` and `resize`: an open call is another one to the agent than to the client."""

    scope = Scope.EXEC

    async def work(self) -> Any:
        if "call" not in self.params:
            return await super().work()
        target = self.relay.find(self.params["call"])
        if target is None or target.client is None or target.call is None:
            raise NotFound("the process has ended, or was not started yet")
        client, self.params["call"] = target.client, target.call.id

        async def connect() -> AgentClient:
            return client

        return await self.pass_on(connect)


class _Files(RelayedCall):
    """A call on files, without their contents."""

    scope = Scope.FILES


class _Out(_Files):
    """Contents that go out, told however that ends."""

    _count = 0

    def count_down(self, count: int) -> None:
        self._count += count

    async def work(self) -> Any:
        path = _path(self.params)
        try:
            return await super().work()
        finally:
            self.relay.ledger.note("file", self.sandbox.id, way="out", path=path, bytes=self._count)


class _In(_Files):
    """Contents that come in, told once they are there."""

    _count = 0

    def count_up(self, count: int) -> None:
        self._count += count

    async def work(self) -> Any:
        path = _path(self.params)
        raw = await super().work()
        self.relay.ledger.note("file", self.sandbox.id, way="in", path=path, bytes=self._count)
        return raw


class _Connect(RelayedCall):
    """A connection to a port, told when it is the first to that port."""

    scope = Scope.PORTS

    async def work(self) -> Any:
        port = _read(self.params, _Port).port
        if port not in self.relay.ports:
            self.relay.ports.add(port)
            self.relay.ledger.note("port", self.sandbox.id, port=port)
        return await super().work()


class _SetEnv(RelayedCall):
    """`set_env`, by the handle, so that the registry knows the names; values are in no answer."""

    scope = Scope.EXEC

    async def work(self) -> Any:
        env = _read(self.params, _Env).env
        if self.relay.user is not None:  # its own agent has to be open to be told
            connect, _ = self.sandbox.connection.of_user(self.relay.user, self.sandbox.spec.user)
            await connect()
        await self.sandbox.set_env(env)
        return {"env": {}}


class _SetLifetime(RelayedCall):
    """`set_lifetime`, by the handle, so that the registry has it too."""

    scope = Scope.CREATE

    async def work(self) -> Any:
        asked = _read(self.params, _Clocks)
        await self.sandbox.set_lifetime(asked.lifetime_s, asked.idle_s)
        return {"lifetime_s": asked.lifetime_s, "idle_s": asked.idle_s}


class _Port(msgspec.Struct):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Env(msgspec.Struct):
    env: dict[str, str]


class _Clocks(msgspec.Struct):
    lifetime_s: float | None = None
    idle_s: float | None = None


KINDS: dict[str, type[RelayedCall]] = {
    **dict.fromkeys(("ping", "metrics", "processes", "interpreters", "service", "service_log"), RelayedCall),
    **dict.fromkeys(("exec", "exec_code"), _Exec),
    "attach": _Attach,
    **dict.fromkeys(("interpreter", "interpret", "end_interpreter"), _Interpret),
    **dict.fromkeys(("signal", "resize"), _OfCall),
    "set_env": _SetEnv,
    "set_lifetime": _SetLifetime,
    **dict.fromkeys(("stat", "list_dir", "make_dir", "move", "remove"), _Files),
    **dict.fromkeys(("chmod", "chown", "symlink", "xattr", "watch", "watch_events", "unwatch"), _Files),
    **dict.fromkeys(("read_file", "tree_download"), _Out),
    **dict.fromkeys(("write_file", "tree_upload"), _In),
    "connect": _Connect,
}
"""Every method that a client may call. What is not here is the server's own: `network` and what belongs to it, `serve`,
`terminate`, `shutdown`, `sync_clock`."""


def _read(params: dict[str, Any], kind: type[T]) -> T:
    """The part of a client's params that is ours to look at. Raises InvalidSpec."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"params: {error}") from None


def _answer(raw: msgspec.Raw, kind: type[T]) -> T:
    """What an agent answered. Raises AgentProtocolError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise AgentProtocolError(f"an answer has the wrong form: {error}. Destroy this sandbox") from None


def _path(params: dict[str, Any]) -> str:
    """The path of a call, as the ledger has it. Raises InvalidSpec."""
    try:
        encoded = params.get("path64")
        return os.fsdecode(base64.b64decode(encoded)) if encoded is not None else str(params.get("path", ""))
    except (ValueError, TypeError):
        raise InvalidSpec("path64: it is no base64", field="path") from None
