"""The handle of a sandbox, and all that can be done with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, Unpack

import msgspec

from skerry import aio, config, trace
from skerry.agent.client import AgentClient
from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import AgentError, InvalidSpec, PathNotFound, SkerryError, WrongState
from skerry.ledger.facts import Command
from skerry.ledger.ledger import OFF
from skerry.model.records import Record
from skerry.model.results import ExecResult, Metrics
from skerry.model.spec import SandboxId, Spec, SpecOptions, new_id, parse_id
from skerry.model.states import State
from skerry.providers.base import Enforcement, Provider
from skerry.sandbox.connection import Connection
from skerry.sandbox.files import AsyncFiles
from skerry.sandbox.interpreter import AsyncInterpreter, AsyncInterpreters
from skerry.sandbox.keeper import Keeper, Lender
from skerry.sandbox.network import AsyncSandboxNetwork, Decide
from skerry.sandbox.ports import AsyncForward, Exposed
from skerry.sandbox.processes import AsyncProcess, AsyncProcesses, ExecOptions, command_params, run_buffered
from skerry.sandbox.service import AsyncService
from skerry.units import parse_duration


class AsyncSandbox:
    """An isolated machine. `async with AsyncSandbox(memory="512M") as sandbox:` makes one and destroys it at the end.

    If the program dies before, the next one that opens the registry destroys it. `create` and `open` are for those who
    decide themselves when it ends.
    """

    def __init__(self, *, provider_object: Provider | None = None, **options: Unpack[SpecOptions]) -> None:
        """With a provider object of your own it is yours alone, in a registry that only this object has."""
        if provider_object is not None:
            options["provider"] = provider_object.name
        settings = config.load()
        spec = settings.spec(options)
        self._bind(new_id(), spec, _lender(provider_object, spec, settings))
        self._is_ephemeral = provider_object is None  # what only this object knows has nobody to end it later

    def _bind(self, id: SandboxId, spec: Spec, lender: Lender | None) -> None:
        self.id = id
        self.spec = spec
        self.enforced: Mapping[str, Enforcement] = {}
        """Each limit: by what it is held on this host, or why it is not."""
        self.connection = Connection(id, self._known_env, self._look, self._wake)
        """The streams to its agents, for other parts of skerry."""
        self.created_at: float | None = None
        """Seconds since 1970; None before it is started, and of one that is reached by a provider object alone."""
        self.files = AsyncFiles(
            self.connection.connect,
            lambda: self.connection.provider.holds(self.spec),
            lambda: self.spec.timeout_s,
            self._moved,
        )
        self.processes = AsyncProcesses(self.connection.connect)
        self.service = AsyncService(self.connection.connect)
        self.network = AsyncSandboxNetwork(self._change_rules, self._live_record, self._provide)
        self.interpreters = AsyncInterpreters(
            self.connection.connect,
            lambda: self.spec.timeout_s,
            lambda language, size: self.tell("code", None, {"language": language, "size": size}),
        )
        self._lender = lender
        self._keeper: Keeper | None = None
        self._ledger = OFF
        self._env: dict[str, str] = dict(spec.env)
        self._exposed = Exposed(self.connection.connect)

    @classmethod
    def of_record(cls, record: Record, keeper: Keeper) -> Self:
        """The handle that a manager gives out."""
        self = cls.__new__(cls)
        self._bind(record.id, record.spec, None)
        self._keeper = keeper
        self.follow(record)
        return self

    @classmethod
    def of_box(cls, id: SandboxId, spec: Spec, provider: Provider) -> Self:
        """A handle of a box that is there already; its agent is not asked."""
        self = cls.__new__(cls)
        self._bind(id, spec, _lender(provider, spec, adopted=id))
        self.connection.attach(State.READY, provider)
        return self

    @classmethod
    async def create(
        cls, spec: Spec | None = None, provider: Provider | None = None, *, ephemeral: bool = False
    ) -> Self:
        """Make a sandbox that lives until it is destroyed or its time is over; an `ephemeral` one also ends with this
        program, however that ends. With a provider object of your own it is yours alone, and no other program's
        registry knows it, so that nobody could end it after you: it cannot be ephemeral."""
        if ephemeral and provider is not None:
            raise InvalidSpec("ephemeral: nobody else knows a sandbox of your own provider object; use `async with`")
        settings = config.load()
        spec = settings.spec({}) if spec is None else settings.complete(spec)
        self = cls.__new__(cls)
        self._bind(new_id(), spec, _lender(provider, spec, settings))
        await self._start(ephemeral=ephemeral)
        return self

    @classmethod
    async def open(cls, id: str, provider: Provider | str | None = None) -> Self:
        """Reach a sandbox again that was made elsewhere or before, by its id, the beginning of it, or its name; one of
        a provider object of your own by its id."""
        if isinstance(provider, Provider):
            self = cls.of_box(parse_id(id), Spec(provider=provider.name), provider)
            await self.ping()
            return self
        lender = _lender(None, Spec())
        keeper = await lender.take()
        self = cls.__new__(cls)
        try:
            record = await keeper.live_record(id)
            self._bind(record.id, record.spec, lender)
            self._keeper = keeper
            self.follow(record)
            await self.ping()
        except BaseException:
            await lender.give_back()
            raise
        return self

    def follow(self, record: Record) -> None:
        """Take over what the registry says of it now."""
        provider = None if self._keeper is None else self._keeper.provider(record.spec.provider)
        self._ledger = self._ledger if self._keeper is None else self._keeper.ledger
        self.connection.attach(record.state, provider)
        self.enforced = msgspec.convert(record.enforced, dict[str, Enforcement])
        self.created_at = record.created_at
        # the registry has no values of an environment: the spec of whoever made it has
        self.spec = record.spec if self._lender is None else msgspec.structs.replace(record.spec, env=self.spec.env)

    @property
    def state(self) -> State:
        return self.connection.state or State.CREATING

    @property
    def addresses(self) -> dict[int, str]:
        """The addresses on this host, such as 127.0.0.1:8080, of the ports of its spec. They stay as they are for as
        long as it lives, whoever runs, and lead nowhere while it is stopped."""
        return {port.port: port.address for port in self.spec.ports if port.address is not None}

    async def __aenter__(self) -> Self:
        """Make it, unless a manager has; leaving the `async with` destroys it."""
        if self._lender is not None:
            if self.connection.state is not None:
                raise WrongState("this sandbox was already started; make another")
            await self._start(ephemeral=self._is_ephemeral)
        return self

    async def __aexit__(self, *_: object) -> None:
        await aio.run_to_end(self.destroy())

    async def _start(self, *, ephemeral: bool) -> None:
        assert self._lender is not None
        self.connection.attach(State.CREATING)
        try:
            keeper = await self._lender.take()
            try:
                record = await keeper.make(self.id, self.spec, ephemeral=ephemeral)
            except BaseException:
                await self._lender.give_back()
                raise
        except BaseException:
            self.connection.attach(State.DESTROYED)
            raise
        self._keeper = keeper
        self.follow(record)

    async def destroy(self, *, volumes: bool = False, grace_s: float | None = None) -> None:
        """End it and remove all of it. Quiet if that has happened already. Its processes get SIGTERM and `grace_s` to
        end, 2 s if nothing is said; then, or at once if that is 0, they are killed."""
        await self._exposed.close()
        if self.connection.state is State.DESTROYED:
            return
        if self.connection.state is None:
            raise WrongState("this sandbox was never started")
        try:
            async with self._registry() as keeper:
                await keeper.destroy(self.id, volumes=volumes, grace_s=grace_s, connection=self.connection)
            self.connection.attach(State.DESTROYED)
        finally:
            self.connection.close()
            await self._let_go()

    async def close(self) -> None:
        """Let go of the stream, of exposed ports and of the registry. The sandbox lives on, and any call opens the
        stream again."""
        await self._disconnect()
        await self._let_go()

    async def _disconnect(self) -> None:
        await self._exposed.close()
        self.connection.close()

    async def _let_go(self) -> None:
        if self._lender is not None and self._keeper is not None:
            self._keeper = None
            await self._lender.give_back(has_ended=self.connection.state is State.DESTROYED)

    @asynccontextmanager
    async def _registry(self) -> AsyncIterator[Keeper]:
        """The manager that keeps it; after a close, one for just this piece of work."""
        if self._keeper is not None:
            yield self._keeper
            return
        assert self._lender is not None
        keeper = await self._lender.take()
        try:
            yield keeper
        finally:
            await self._lender.give_back()

    async def _known_env(self, client: AgentClient) -> dict[str, str]:
        """Variables that the host added to the box's environment. Code in the box may have taken over its agent, and
        one of another user, who may be root, is to be told nothing that comes from there."""
        async with self._registry() as keeper:
            return await keeper.known_env(self.id, client, self._env)

    async def _look(self) -> None:
        """Follow what the host says of it."""
        async with self._registry() as keeper:
            self.follow(await keeper.look(self.id))

    async def _wake(self) -> None:
        """Wake it for a call, unless it sleeps until somebody says so."""
        if self.spec.sleep_after_s:
            async with self._registry() as keeper:
                self.follow(await keeper.wake(self.id))

    async def _change_rules(self, decide: Decide) -> Record:
        async with self._registry() as keeper:
            record = await keeper.change_rules(self.id, decide)
        self.follow(record)
        return record

    async def _provide(self, values: Mapping[str, str]) -> None:
        async with self._registry() as keeper:
            await keeper.provide(self.id, values)

    async def _live_record(self) -> Record:
        async with self._registry() as keeper:
            return await keeper.live_record(self.id)

    async def exec(self, command: Sequence[str] | str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command to its end: a list is argv, a string is for the shell.

        A command that fails, is missing (127, and `not_started` tells) or takes longer than `timeout_s` is a result,
        with the output so far. At most `limit` bytes of each output are kept, its beginning and its end. The callbacks
        get output as it comes; with `combined` all is standard output, in the order in which it is written. Raises
        UserNotFound, PathNotFound for a `cwd` that is not there, and ArgumentsTooLong. Without a `timeout_s` it is the
        spec's; 0 is any time.
        """
        return await self._run("exec", command, options)

    async def run_code(self, language: str | None, code: str | bytes, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run code in a language (None: the spec's). Raises InterpreterNotFound if the box has none for it."""
        language = language or self.spec.language
        if language is None:
            raise InvalidSpec("language: none was given, and the spec has none", field="language")
        attachment = code.encode() if isinstance(code, str) else code
        return await self._run("exec_code", None, options, attachment, language=language)

    async def interpreter(
        self,
        language: str = "python",
        *,
        name: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        engine: str = "auto",
    ) -> AsyncInterpreter:
        """An interpreter that remembers what is run in it: the one of that name, which is made if there is none;
        without a name, the one that everybody shares who wants that language. Raises InterpreterNotFound, Conflict."""
        return await self.interpreters.open(language, name=name, cwd=cwd, env=env, engine=engine)

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
        connect, user = self.connection.of_user(options.get("user"), self.spec.user)
        timeout_s = (self.spec.timeout_s if (given := options.get("timeout_s")) is None else given) or None
        params = command_params(command, cwd=options.get("cwd"), env=options.get("env"), user=user, timeout_s=timeout_s)
        told = self.tell(_WORDS[method], command, options, size=len(attachment), **more)
        try:
            with trace.span("skerry.exec", provider=self.spec.provider, sandbox=self.id):
                result = await run_buffered(await connect(), method, {**params, **more}, options, attachment)
        except BaseException as error:
            told.fail(error)
            raise
        told.end(result)
        return result

    def tell(self, how: str, command: Sequence[str] | str | None, options: Mapping[str, Any], **more: Any) -> Command:
        """Tell the ledger of a command before it runs. Raises LedgerFull or LedgerError."""
        return Command.begin(self._ledger, self.id, how, command, options, **more)

    def _moved(self, way: str, path: str, size: int) -> None:
        self._ledger.note("file", self.id, way=way, path=path, bytes=size)

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
        connect, named = self.connection.of_user(user, self.spec.user, background=background)
        params = command_params(command, cwd=cwd, env=env, user=named, timeout_s=timeout_s)
        params |= {"stdin": stdin, "background": background, "tag": tag}
        told = self.tell("start", command, params | {"user": user})
        return await AsyncProcess.start(connect, "exec", params, told=told)

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
        connect, named = self.connection.of_user(user, self.spec.user, background=background)
        if not command:
            try:
                await AsyncFiles(connect).stat("/bin/sh")
            except PathNotFound:
                raise AgentError("this box has no shell, /bin/sh is missing: name a program that is in it") from None
        params = command_params(command or SHELL, cwd=cwd, env=env, user=named, timeout_s=timeout_s)
        params |= {"pty": {"rows": rows, "cols": cols}, "background": background, "tag": tag}
        told = self.tell("terminal", command, params | {"user": user})
        return await AsyncProcess.start(connect, "exec", params, told=told)

    async def cwd(self) -> str:
        """The folder where commands and relative paths start: the spec's `cwd`, else its image's, else the work
        folder."""
        return (await self.files.stat(".")).path

    async def ping(self) -> None:
        """Raises unless the agent answers."""
        await (await self.connection.connect()).call("ping", type=dict[str, Any])

    async def is_healthy(self) -> bool:
        """Whether its agent answers, now; a busy one does too."""
        try:
            await self.ping()
        except SkerryError:
            return False
        return True

    async def metrics(self) -> Metrics:
        """Memory, CPU, disk and processes of the box now."""
        return await (await self.connection.connect()).call("metrics", type=Metrics)

    async def set_lifetime(self, lifetime: float | str | None = None, idle: float | str | None = None) -> None:
        """Change when it ends by itself, counted from now; None is never."""
        seconds = {
            "lifetime_s": None if lifetime is None else parse_duration(lifetime, "lifetime"),
            "idle_s": None if idle is None else parse_duration(idle, "idle"),
        }
        await self.call("set_lifetime", seconds)
        async with self._registry() as keeper:
            self.follow(await keeper.note_lifetime(self.id, lifetime, idle))

    async def set_env(self, env: Mapping[str, str]) -> None:
        """Add to the environment of all commands from now on. It is told to the agents alone, and kept nowhere else."""
        async with self._registry() as keeper:
            await keeper.note_env(self.id, env)
        self._ledger.note("env", self.id, names=sorted(env))
        await self.connection.connect()
        for client in self.connection.clients():
            await client.call("set_env", {"env": dict(env)}, type=dict[str, Any])
        self._env.update(env)

    async def connect(self, port: int) -> AsyncTunnel:
        """One connection to a port in the sandbox."""
        return await AsyncTunnel.open(self.connection.connect, port)

    def forward(self, port: int, local_port: int = 0) -> AsyncForward:
        """A port of this host's loopback that leads to one in the sandbox, while the `async with` lasts."""
        self._ledger.note("port", self.id, port=port, local=local_port or None)
        return AsyncForward(self.connection.connect, port, local_port)

    async def expose(self, port: int, local_port: int = 0) -> str:
        """An address on this host's loopback, such as 127.0.0.1:49152, that leads to a port in the sandbox until this
        object is closed or destroyed. The same port again gives the same address."""
        address = await self._exposed.open(port, local_port)
        self._ledger.note("port", self.id, port=port, local=address)
        return address

    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Any call of PROTOCOL.md."""
        return await (await self.connection.connect()).call(method, params, type=dict[str, Any])


_WORDS = {"exec": "exec", "exec_code": "code"}
SHELL = (
    'if [ -x "$SHELL" ] && [ "${SHELL##*/}" != nologin ] && [ "${SHELL##*/}" != false ]; then exec "$SHELL"; fi; '
    "if command -v bash >/dev/null; then exec bash; fi; exec sh"
)


def _lender(
    provider: Provider | None, spec: Spec, settings: config.Config | None = None, *, adopted: SandboxId | None = None
) -> Lender:
    """The source of a handle's manager: that of this event loop, or with a provider object one of its own."""
    from skerry.manager import lend  # the one import that points upwards: whoever makes a sandbox needs a manager

    return lend.Shared() if provider is None else lend.Own(provider, spec, settings, adopted)
