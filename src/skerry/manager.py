"""The manager: creates, tracks, uses and destroys sandboxes, and never loses one. The store is the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self, Unpack

import msgspec

from skerry import ending, lifecycle, owners
from skerry.config import Config
from skerry.config import load as load_config
from skerry.errors import InvalidSpec, NotFound, SkerryError, Unsupported, WrongState
from skerry.explain import Explanation, explain
from skerry.files import AnyPath
from skerry.lifecycle import State
from skerry.making import Maker
from skerry.managed import ManagedSandbox
from skerry.processes import ExecOptions
from skerry.providers.base import Enforcement, Provider
from skerry.reconcile import Verdict
from skerry.records import Cause, Event, Filter, Record
from skerry.repair import Repair
from skerry.results import ExecResult, FileInfo
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId, Spec, SpecOptions, new_id
from skerry.store import Store

ALL = Filter()
_POLL_S = (0.01, 0.25)
"""First and longest wait between two looks."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one sandbox among many."""

    id: SandboxId
    error: SkerryError | None = None


class AsyncSandboxManager:
    """Many sandboxes under one registry, which other programs and shells share.

    `async with AsyncSandboxManager() as manager:` opens the registry that the configuration names and goes on with
    what a crash has left unfinished.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        store: Store | None = None,
        providers: Mapping[str, Provider] | None = None,
        reconcile: bool = True,
    ) -> None:
        self._config = config or load_config()
        self._given_store = store
        self._open_store: Store | None = store
        self._providers: dict[str, Provider] = dict(providers or {})
        self._given_providers = frozenset(self._providers)
        self._reconcile_on_start = reconcile
        self._handles: dict[SandboxId, ManagedSandbox] = {}

    @property
    def config(self) -> Config:
        return self._config

    @property
    def store(self) -> Store:
        if self._open_store is None:
            raise WrongState("the manager is not open: enter it with `async with`")
        return self._open_store

    @property
    def _repair(self) -> Repair:
        return Repair(self.store, self.provider)

    async def __aenter__(self) -> Self:
        if self._open_store is None:
            self._open_store = await Store.open(self._config.database)
        if self._reconcile_on_start:
            await self._repair.unfinished()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of streams, providers and the store. Sandboxes live on."""
        for handle in self._handles.values():
            await handle.close()
        self._handles.clear()
        for name, provider in self._providers.items():
            if name not in self._given_providers:
                await provider.aclose()
        if self._open_store is not None and self._given_store is None:
            await self._open_store.aclose()
            self._open_store = None

    def provider(self, name: str) -> Provider:
        if name not in self._providers:
            self._providers[name] = self._config.load_provider(name)
        return self._providers[name]

    # making

    async def create(
        self,
        spec: Spec | None = None,
        *,
        key: str | None = None,
        ephemeral: bool = False,
        id: SandboxId | None = None,
        **options: Unpack[SpecOptions],
    ) -> AsyncSandbox:
        """Make a sandbox, or nothing. With a `key`, the same create again gives the same sandbox.

        An `ephemeral` one ends with this program, however that ends.
        """
        spec = self._complete(spec, options)
        maker = Maker(self.store, self._config)
        provider = self.provider(spec.provider)
        record, is_new = await maker.make(id or new_id(), spec, provider, ephemeral=ephemeral, key=key)
        if not is_new:
            record = await self.wait(record.id, {State.READY, State.PAUSED, State.STOPPED})
        return self._handle(record)

    def _complete(self, spec: Spec | None, options: SpecOptions) -> Spec:
        if spec is not None and options:
            raise InvalidSpec("give a spec or its fields, not both")
        return self._config.spec(options) if spec is None else self._config.complete(spec)

    async def create_default(self) -> AsyncSandbox:
        """A sandbox as the configuration has it."""
        return await self.create()

    async def register(self, sandbox: AsyncSandbox) -> AsyncSandbox:
        """Take a sandbox that was made elsewhere into the registry. If that is refused it stays the caller's."""
        self.provider(sandbox.spec.provider)
        record, _ = await self.store.reserve(
            sandbox.id,
            sandbox.spec,
            owner=owners.this_process(),
            boot_id=owners.boot_id(),
            max_sandboxes=self._config.max_sandboxes,
            state=State.READY,
            enforced=msgspec.to_builtins(dict(sandbox.enforced)),
        )
        return self._handle(record)

    # finding

    def _handle(self, record: Record) -> ManagedSandbox:
        handle = self._handles.get(record.id)
        if handle is None:
            handle = ManagedSandbox.__new__(ManagedSandbox)
            handle._bind(record.id, record.spec, self.provider(record.spec.provider))
            handle._manager = self
            self._handles[record.id] = handle
        handle._state = record.state
        handle.enforced = msgspec.convert(record.enforced, dict[str, Enforcement])
        return handle

    async def get(self, reference: str) -> AsyncSandbox:
        """A sandbox by its id, the beginning of it, or its name."""
        record = await self.record(reference)
        if not record.is_live:
            raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
        return self._handle(record)

    async def record(self, reference: str) -> Record:
        """What the registry knows of it, also when it has ended."""
        return await self.store.find(reference)

    async def list(self, filter: Filter = ALL) -> list[Record]:
        """Those that fit, oldest first."""
        return await self.store.list(filter)

    async def count(self, filter: Filter = ALL) -> int:
        """How many fit."""
        return await self.store.count(filter)

    async def exists(self, reference: str) -> bool:
        """Whether it is there and has not ended."""
        try:
            return (await self.record(reference)).is_live
        except NotFound:
            return False

    @asynccontextmanager
    async def with_sandbox(self, reference: str) -> AsyncIterator[AsyncSandbox]:
        """Use a sandbox for a while; its stream is closed after, the sandbox lives on."""
        sandbox = await self.get(reference)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    # using

    async def execute(self, reference: str, command: Sequence[str] | str, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command in it to its end; options as for `Sandbox.exec`."""
        return await (await self.get(reference)).exec(command, **options)

    async def execute_code(
        self, reference: str, language: str | None, code: str, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run code in it; options as for `Sandbox.run_code`."""
        return await (await self.get(reference)).run_code(language, code, **options)

    async def read_file(self, reference: str, path: AnyPath) -> bytes:
        """A file of it, whole."""
        return await (await self.get(reference)).files.read(path)

    async def write_file(self, reference: str, path: AnyPath, data: bytes | str) -> int:
        """Write a whole file into it; its size."""
        return await (await self.get(reference)).files.write(path, data)

    async def list_dir(self, reference: str, path: AnyPath = ".", *, depth: int = 1) -> Sequence[FileInfo]:
        """What is in a folder of it."""
        return await (await self.get(reference)).files.list(path, depth=depth)

    async def is_healthy(self, reference: str) -> bool:
        """Whether its agent answers, now; a busy one does too."""
        try:
            sandbox = await self.get(reference)
            await sandbox.ping()
        except SkerryError:
            return False
        return True

    # ending

    async def destroy(self, reference: str, *, volumes: bool = False, cause: Cause = Cause.USER) -> None:
        """End a sandbox and remove all of it. Quiet if it has ended; safe while it is being made."""
        record = await self.record(reference)
        handle = self._handles.pop(record.id, None)
        if handle is not None:
            await handle.close()
        if record.is_live:
            record = await ending.doom(self.store, record, cause)
            await ending.finish(self.store, self.provider, record, volumes=volumes)

    async def destroy_all(self, filter: Filter = ALL, *, volumes: bool = False) -> Sequence[Outcome]:
        """End all that fit, in parallel, as well as it goes; each failure is told. Safe while creates run."""

        async def destroy(id: SandboxId) -> Outcome:
            try:
                await self.destroy(id, volumes=volumes)
            except SkerryError as error:
                return Outcome(id, error)
            return Outcome(id)

        return await asyncio.gather(*(destroy(record.id) for record in await self.list(filter)))

    async def set_lifetime(
        self, reference: str, lifetime: float | str | None = None, idle: float | str | None = None
    ) -> None:
        """Change when it ends by itself, counted from now; None is never. The agent keeps the time."""
        record = await self.record(reference)
        await AsyncSandbox.set_lifetime(self._handle(record), lifetime, idle)
        spec = record.spec.but(lifetime=lifetime, idle=idle)
        if spec.lifetime_s:
            spec = msgspec.structs.replace(spec, lifetime_s=time.time() - record.created_at + spec.lifetime_s)
        await self.store.change(await self.store.get(record.id), spec=spec, kind="lifetime")
        self._handle(record).spec = spec

    # states by capability

    async def pause(self, reference: str) -> None:
        """Freeze it, where the provider can."""
        await self._switch(reference, "pause", State.PAUSED)

    async def resume(self, reference: str) -> None:
        """Let a paused one go on."""
        await self._switch(reference, "resume", State.READY)

    async def stop(self, reference: str) -> None:
        """End its processes and keep its files, where the provider can."""
        await self._switch(reference, "stop", State.STOPPED)

    async def start(self, reference: str) -> None:
        """Start a stopped one again."""
        await self._switch(reference, "start", State.READY)

    async def _switch(self, reference: str, verb: str, to: State) -> None:
        record = await self.record(reference)
        lifecycle.move(record.state, to)
        act = getattr(self.provider(record.spec.provider), verb, None)
        if act is None:
            raise Unsupported(verb, record.spec.provider, f"it has no {verb}")
        await self._handle(record).close()
        await act(record.id)
        self._handle(await self.store.change(record, to=to))

    # knowing

    async def explain(self, reference: str) -> Explanation:
        """When it will end and why, or why it did."""
        record = await self.record(reference)
        return await explain(record, self._handle(record))

    async def wait(self, reference: str, states: set[State] | None = None, timeout_s: float | None = None) -> Record:
        """Wait until it is in one of `states`; without any, until it has ended. Raises if it never will be."""
        id = (await self.record(reference)).id
        async with asyncio.timeout(timeout_s):
            wait, longest = _POLL_S
            while True:
                record = await self.store.get(id)
                if record.state in (states or {State.DESTROYED, State.LOST}):
                    return record
                if states and record.state in (State.LOST, State.ERROR):
                    raise WrongState(f"sandbox {record.id} is {record.state}: {record.cause}. Destroy it to go on")
                if not record.is_live:
                    raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}. {record.detail}")
                await self._repair.sandbox(record)
                await asyncio.sleep(wait)
                wait = min(wait * 2, longest)

    async def look_after(self, reference: str) -> Record:
        """See what the host says of one sandbox, follow that, and tell what is known of it then."""
        record = await self.record(reference)
        await self._repair.sandbox(record)
        return await self.store.get(record.id)

    async def events(self, *, after: int = 0, follow: bool = False, sandbox: str | None = None) -> AsyncIterator[Event]:
        """All that happened after a place in the order, and with `follow` all that will."""
        id = None if sandbox is None else (await self.record(sandbox)).id
        wait, longest = _POLL_S
        while True:
            events = await self.store.events(after=after, sandbox=id)
            for event in events:
                after = event.seq
                yield event
            if events:
                wait = _POLL_S[0]
            elif follow:
                await asyncio.sleep(wait)
                wait = min(wait * 2, longest)
            else:
                return

    async def prune(self, *, older_s: float = 86400.0) -> int:
        """Forget what ended longer ago than that; how many records."""
        return await self.store.prune(before=time.time() - older_s)

    async def reconcile(self, *, dry_run: bool = False) -> Sequence[Verdict]:
        """Compare the registry with every provider it speaks of and the default one, and repair the difference."""
        names = {record.spec.provider for record in await self.store.list()} | {self._config.provider, *self._providers}
        found = [await self._repair.provider(name, dry_run=dry_run) for name in sorted(names)]
        return [verdict for verdicts in found for verdict in verdicts]
