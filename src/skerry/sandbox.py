"""What a user holds: a sandbox, and all that can be done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

from skerry import config, lifecycle, workspace
from skerry.agent.client import AgentClient
from skerry.errors import AgentError, InvalidSpec, PathNotFound, Unsupported, WrongState
from skerry.files import AsyncFiles
from skerry.lifecycle import State
from skerry.processes import (
    DEFAULT_LIMIT,
    AsyncProcess,
    AsyncProcesses,
    Connect,
    ExecOptions,
    command_params,
    run_buffered,
)
from skerry.providers.base import Capability, Enforcement, Provider
from skerry.results import ExecResult, Metrics
from skerry.spec import SandboxId, Spec, SpecOptions, new_id, parse_id
from skerry.tunnels import AsyncForward, AsyncTunnel, Exposed
from skerry.units import parse_duration

_GREETING_S = 10.0


class AsyncSandbox:
    """An isolated machine. `async with AsyncSandbox(memory="512M") as sandbox:` makes one and destroys it at the end.

    `create` and `open` are for those who decide themselves when it ends.
    """

    def __init__(self, *, provider_object: Provider | None = None, **options: Unpack[SpecOptions]) -> None:
        if provider_object is not None:
            options["provider"] = provider_object.name
        self._bind(new_id(), config.load().spec(options), provider_object)

    def _bind(self, id: SandboxId, spec: Spec, provider: Provider | None) -> None:
        self.id = id
        self.spec = spec
        self.enforced: Mapping[str, Enforcement] = {}
        """How each limit is held on this host, or why it is not."""
        self._provider = provider
        self._state: State | None = None
        self._client: AgentClient | None = None
        self._of_others: dict[str, AgentClient] = {}
        self._dialling: asyncio.Lock | None = None
        self._exposed: Exposed | None = None
        self.files = AsyncFiles(self._connect)
        self.processes = AsyncProcesses(self._connect)

    @classmethod
    async def create(cls, spec: Spec | None = None, provider: Provider | None = None) -> Self:
        """Make a sandbox that lives until it is destroyed or its time is over."""
        self = cls.__new__(cls)
        settings = config.load()
        self._bind(new_id(), settings.spec({}) if spec is None else settings.complete(spec), provider)
        await self._create()
        return self

    @classmethod
    async def open(cls, id: str, provider: Provider | str | None = None) -> Self:
        """Reach a sandbox again that was made elsewhere or before."""
        self = cls.__new__(cls)
        name = provider if isinstance(provider, str) else config.load().provider
        spec = Spec(provider=provider.name if isinstance(provider, Provider) else name)
        self._bind(parse_id(id), spec, provider if isinstance(provider, Provider) else None)
        self._state = State.READY
        await self.ping()
        return self

    @property
    def state(self) -> State:
        return self._state or State.CREATING

    def _provider_object(self) -> Provider:
        if self._provider is None:
            self._provider = config.load().load_provider(self.spec.provider)
        return self._provider

    async def _create(self) -> None:
        self._state = State.CREATING
        try:
            provider = self._provider_object()
            self.enforced = await lifecycle.admit(provider, workspace.for_box(self.spec))
            async with workspace.opened(self.spec) as work:
                await work.make_box(provider, self.id)
            self.spec = work.spec
        except BaseException:
            self._state = State.DESTROYED
            raise
        self._state = lifecycle.move(self._state, State.READY)

    async def __aenter__(self) -> Self:
        if self._state is not None:
            raise WrongState("this sandbox was already started; make another")
        await self._create()
        return self

    async def __aexit__(self, *_: object) -> None:
        await lifecycle.run_to_end(self.destroy())

    async def destroy(self, *, volumes: bool = False) -> None:
        """End it and remove all of it. Quiet if that has happened already."""
        await self.close()
        if self._state is not State.DESTROYED:
            await self._provider_object().destroy(self.id, volumes=volumes)
            self._state = State.DESTROYED

    async def close(self) -> None:
        """Let go of the stream and of exposed ports. The sandbox lives on, and any call opens the stream again."""
        if self._exposed is not None:
            await self._exposed.close()
        while self._of_others:
            self._of_others.popitem()[1].close()
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _connect(self) -> AgentClient:
        """The open stream, or a new one: streams break, agents stay."""
        if self._client is not None and self._client.is_open:
            return self._client
        async with self._may_dial():
            if self._client is None or not self._client.is_open:
                stream = await self._provider_object().dial(self.id)
                self._client = await AgentClient.greet(stream, timeout_s=_GREETING_S)
            return self._client

    async def _connect_as(self, user: str) -> AgentClient:
        """A stream to an agent that runs as another user, and ends with the stream."""
        client = self._of_others.get(user)
        if client is not None and client.is_open:
            return client
        own = await self._connect()
        async with self._may_dial():
            client = self._of_others.get(user)
            if client is None or not client.is_open:
                stream = await lifecycle.able(self._provider_object(), Capability.USERS).dial_as(self.id, user)
                client = self._of_others[user] = await AgentClient.greet(stream, timeout_s=_GREETING_S)
                # Only the box's own agent knows the values of its environment.
                told = await own.call("set_env", {"env": {}}, type=dict[str, dict[str, str]])
                await client.call("set_env", {"env": told["env"]}, type=dict[str, Any])
            return client

    def _way(self, user: str | None, *, background: bool = False) -> tuple[Connect, str | None]:
        """How to reach an agent for a command of that user, and the user to tell it: an agent that is not root can be
        nobody else."""
        if user is None:
            return self._connect, None
        provider = self._provider_object()
        if Capability.USERS not in provider.capabilities:
            return self._connect, user
        if user == self.spec.user:
            return self._connect, None
        if background:
            reason = "a process of another user ends with the stream that began it; start it in the foreground"
            raise Unsupported("background", provider.name, reason)
        return partial(self._connect_as, user), None

    def _may_dial(self) -> asyncio.Lock:
        if self._state is not State.READY:
            how = "enter it with `with`, or use create()" if self._state is None else lifecycle.unusable(self._state)
            raise WrongState(f"sandbox {self.id} cannot be used: {how}")
        if self._dialling is None:
            self._dialling = asyncio.Lock()
        return self._dialling

    # commands

    async def exec(self, command: Sequence[str] | str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command to its end: a list is argv, a string is for the shell.

        A command that fails, is missing (127) or takes longer than `timeout_s` is a result, with the output so far. At
        most `limit` bytes of each output are kept. The callbacks get output as it comes.
        """
        return await self._run("exec", command, options)

    async def run_code(self, language: str | None, code: str | bytes, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run code in a language (None: the spec's). Raises InterpreterNotFound if the box has none for it."""
        language = language or self.spec.language
        if language is None:
            raise InvalidSpec("language: none was given, and the spec has none", field="language")
        attachment = code.encode() if isinstance(code, str) else code
        return await self._run("exec_code", None, options, attachment, language=language)

    async def _run(
        self,
        method: str,
        command: Sequence[str] | str | None,
        options: ExecOptions,
        attachment: bytes = b"",
        **more: str,
    ) -> ExecResult:
        unknown = options.keys() - ExecOptions.__optional_keys__
        if unknown:
            raise TypeError(f"{method} has no option {', '.join(sorted(unknown))}")
        connect, user = self._way(options.get("user"))
        params = command_params(
            command,
            cwd=options.get("cwd"),
            env=options.get("env"),
            user=user,
            timeout_s=options.get("timeout_s"),
        )
        stdin = options.get("stdin")
        return await run_buffered(
            await connect(),
            method,
            {**params, **more},
            attachment=attachment,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            limit=options.get("limit", DEFAULT_LIMIT),
            on_stdout=options.get("on_stdout"),
            on_stderr=options.get("on_stderr"),
        )

    async def start(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout_s: float | None = None,
        background: bool = False,
        tag: str | None = None,
    ) -> AsyncProcess:
        """Start a command and talk with it. With `background` it lives on when nobody listens."""
        connect, user = self._way(user, background=background)
        params = command_params(command, cwd=cwd, env=env, user=user, timeout_s=timeout_s)
        params |= {"stdin": stdin, "background": background, "tag": tag}
        return await AsyncProcess.start(connect, "exec", params)

    async def pty(
        self,
        command: Sequence[str] | str | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        background: bool = False,
        tag: str | None = None,
    ) -> AsyncProcess:
        """A command on a terminal; without one, the box's shell: $SHELL, else bash, else sh."""
        connect, user = self._way(user, background=background)
        if not command:
            await _need_shell(AsyncFiles(connect))
        params = command_params(command or _SHELL, cwd=cwd, env=env, user=user, timeout_s=timeout_s)
        params |= {"pty": {"rows": rows, "cols": cols}, "background": background, "tag": tag}
        return await AsyncProcess.start(connect, "exec", params)

    # the box

    async def ping(self) -> None:
        """Raises unless the agent answers."""
        await (await self._connect()).call("ping", type=dict[str, Any], timeout_s=_GREETING_S)

    async def metrics(self) -> Metrics:
        """What the box uses now."""
        return await (await self._connect()).call("metrics", type=Metrics)

    async def set_lifetime(self, lifetime: float | str | None = None, idle: float | str | None = None) -> None:
        """Change when it ends by itself, counted from now; None is never."""
        params = {
            "lifetime_s": None if lifetime is None else parse_duration(lifetime, "lifetime"),
            "idle_s": None if idle is None else parse_duration(idle, "idle"),
        }
        await (await self._connect()).call("set_lifetime", params, type=dict[str, Any])

    async def set_env(self, env: Mapping[str, str]) -> None:
        """Add to the environment of all commands from now on. It is told to the agent alone, and kept nowhere else."""
        await (await self._connect()).call("set_env", {"env": dict(env)}, type=dict[str, Any])

    async def connect(self, port: int) -> AsyncTunnel:
        """One connection to a port in the sandbox."""
        return await AsyncTunnel.open(self._connect, port)

    def forward(self, port: int, local_port: int = 0) -> AsyncForward:
        """A port of this host's loopback that leads to one in the sandbox, while the `async with` lasts."""
        return AsyncForward(self._connect, port, local_port)

    async def expose(self, port: int, local_port: int = 0) -> str:
        """An address on this host's loopback, such as 127.0.0.1:49152, that leads to a port in the sandbox until this
        object is closed or destroyed. The same port again gives the same address."""
        if self._exposed is None:
            self._exposed = Exposed(self._connect)
        return await self._exposed.open(port, local_port)

    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Any call of PROTOCOL.md."""
        return await (await self._connect()).call(method, params, type=dict[str, Any])


async def _need_shell(files: AsyncFiles) -> None:
    try:
        await files.stat("/bin/sh")
    except PathNotFound:
        raise AgentError("this box has no shell, /bin/sh is missing: name a program that is in it") from None


_SHELL = (
    'if [ -x "$SHELL" ] && [ "${SHELL##*/}" != nologin ] && [ "${SHELL##*/}" != false ]; then exec "$SHELL"; fi; '
    "if command -v bash >/dev/null; then exec bash; fi; exec sh"
)
