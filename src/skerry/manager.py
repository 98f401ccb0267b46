"""The manager: creates, tracks, uses and destroys sandboxes, and never loses one. The store is the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Unpack

import msgspec

from skerry import lifecycle, owners
from skerry.errors import InvalidSpec, NotFound, SkerryError, WrongState
from skerry.explain import Explanation, explain
from skerry.files import AnyPath
from skerry.images import ImageMethods
from skerry.lifecycle import State
from skerry.processes import ExecOptions
from skerry.providers.base import Capability, HasLogs
from skerry.reconcile import Verdict
from skerry.records import Event, Filter, Record
from skerry.results import ExecResult, FileInfo
from skerry.sandbox import AsyncSandbox
from skerry.snapshots import SnapshotMethods
from skerry.spec import SandboxId, Spec, SpecOptions, new_id
from skerry.states import StateMethods
from skerry.volumes import VolumeMethods
from skerry.watching import Watcher

ALL = Filter()
_POLL_S = (0.01, 0.25)
"""First and longest wait between two looks."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one sandbox among many."""

    id: SandboxId
    error: SkerryError | None = None


class AsyncSandboxManager(StateMethods, SnapshotMethods, VolumeMethods, ImageMethods):
    """Many sandboxes under one registry, which other programs and shells share.

    `async with AsyncSandboxManager() as manager:` opens the registry that the configuration names and goes on with
    what a crash has left unfinished.
    """

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
        return await self._create(id or new_id(), self._complete(spec, options), ephemeral=ephemeral, key=key)

    async def _create(
        self,
        id: SandboxId,
        spec: Spec,
        *,
        ephemeral: bool,
        key: str | None = None,
        on_known: Callable[[], None] | None = None,
    ) -> AsyncSandbox:
        provider = self.provider(spec.provider)
        record, is_new = await self._maker.make(id, spec, provider, ephemeral=ephemeral, key=key, on_known=on_known)
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

    async def destroy_all(self, filter: Filter = ALL, *, volumes: bool = False) -> Sequence[Outcome]:
        """End all that fit, in parallel, as well as it goes; each failure is told. Safe while creates run."""

        async def destroy(id: SandboxId) -> Outcome:
            try:
                await self.destroy(id, volumes=volumes)
            except SkerryError as error:
                return Outcome(id, error)
            return Outcome(id)

        return await asyncio.gather(*(destroy(record.id) for record in await self.list(filter)))

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
                    why = record.detail or f"{record.cause}. Destroy it to go on"
                    raise WrongState(f"sandbox {record.id} is {record.state}: {why}")
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
        """All that happened after a place in the order, and with `follow` all that will, also what others do to boxes
        by hand, where the provider tells."""
        id = None if sandbox is None else (await self.record(sandbox)).id
        following = asyncio.create_task(self.follow()) if follow else None
        try:
            wait, longest = _POLL_S
            while True:
                events = await self.store.events(after=after, sandbox=id)
                for event in events:
                    after = event.seq
                    yield event
                if events:
                    wait = _POLL_S[0]
                elif following is not None:
                    if following.done():
                        following.result()  # it never ends by itself, so this tells why
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, longest)
                else:
                    return
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])

    async def follow(self) -> None:
        """Until it is cancelled: what others do to boxes is written down when it happens, where the provider tells."""
        await Watcher(self.store, self.provider, self._repair).run()

    async def logs(self, reference: str, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        """What the box itself said, such as its agent's last words, where the provider keeps it."""
        record = await self.record(reference)
        box: HasLogs = lifecycle.able(self.provider(record.spec.provider), Capability.LOGS)
        async for chunk in box.logs(record.id, follow=follow, tail=tail):
            yield chunk

    async def prune(self, *, older_s: float = 86400.0) -> int:
        """Forget what ended longer ago than that; how many records."""
        return await self.store.prune(before=time.time() - older_s)

    async def reconcile(self, *, dry_run: bool = False, rebuild: bool = False) -> Sequence[Verdict]:
        """Compare the registry with every provider it speaks of and the default one, and repair the difference. With
        `rebuild`, what runs on an image that has a newer one by its name is made anew; volumes are kept."""
        repair = self._repair
        names = await self._provider_names(include_ended=True)  # a box may come after its end
        found = [await repair.provider(name, dry_run=dry_run, rebuild=rebuild) for name in names]
        return [verdict for verdicts in found for verdict in verdicts]
