"""The manager: creates, tracks, uses and destroys sandboxes, and never loses one. The store is the registry."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from skerry.aio import require_asyncio
from skerry.config import Config, load
from skerry.errors import InvalidSpec, NotFound, SkerryError, WrongState
from skerry.ledger.reading import AsyncLedger
from skerry.manager.decide import Verdict
from skerry.manager.handles import Handles
from skerry.manager.images import BuildOptions, Images, build_of, silent
from skerry.manager.parts import Parts
from skerry.manager.providers import Providers, require_capability
from skerry.manager.repair import GLANCE_S, LOOK_S, Repair, Timekeeper, due_in
from skerry.manager.watch import Explanation, explain
from skerry.model.records import Cause, Event, Filter, Record
from skerry.model.results import ExecResult, FileInfo, Outcome
from skerry.model.spec import SandboxId, Spec, SpecOptions, new_id
from skerry.model.states import State
from skerry.model.tenants import NO_QUOTA, Quota
from skerry.providers.base import Capability, HasLogs, Image, OnProgress, Provider, Snapshot, Volume
from skerry.sandbox.entries import AnyPath
from skerry.sandbox.processes import ExecOptions
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelInfo

ALL = Filter()


class AsyncSandboxManager:
    """Many sandboxes under one registry, which other programs and shells share.

    `async with AsyncSandboxManager() as manager:` opens the registry that the configuration names and goes on with
    what a crash has left unfinished.
    """

    fleet_type: type[Any] | None = None
    """Class of its fleets, where that is another than `AsyncFleet`."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        store: Store | None = None,
        providers: Mapping[str, Provider] | None = None,
        reconcile: bool = True,
    ) -> None:
        self.config = config or load()
        self.ledger = AsyncLedger(self.config)
        self._providers = Providers(self.config, providers or {})
        self._images = Images(self.config, self._providers)
        self._has_own_store = store is None
        self._parts = None if store is None else Parts(store, self.config, self._providers, self._seen, shared=False)
        self._reconcile_on_start = reconcile
        self._is_whole = True
        self._timekeeper: Timekeeper | None = None

    def of_project(self, project: str, quota: Quota = NO_QUOTA) -> Self:
        """The same manager for one project: to it there are no others, and its sandboxes keep to the quota. It is open
        already, and closed before this one."""
        scoped = copy(self)
        scoped._is_whole = False
        scoped.config = msgspec.structs.replace(self.config, project=project)
        store, shared = self.store.of_project(project, quota), not self._providers.given
        scoped._parts = Parts(store, scoped.config, self._providers, self._seen, shared=shared, like=self._open)
        return scoped

    async def __aenter__(self) -> Self:
        require_asyncio()
        if self._parts is None:
            store = await Store.open(self.config.database)
            shared = not self._providers.given
            self._parts = Parts(store, self.config, self._providers, self._seen, shared=shared)
        first_s = await self._open.repair.unfinished() if self._reconcile_on_start else LOOK_S
        if self._timekeeper is None:
            orphans = self._open.repair.orphans if self._reconcile_on_start else None
            self._timekeeper = Timekeeper(self._open.look_after_all, orphans)
        self._timekeeper.look_in(first_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of streams, providers and the store. Sandboxes live on."""
        if not self._is_whole:
            await self.handles.aclose()
            return
        if self._timekeeper is not None:
            await self._timekeeper.aclose()
            self._timekeeper = None
        if self._parts is not None:
            await self._parts.handles.aclose()
            self._parts.store.ledger.close()
        await self._providers.aclose()
        if self._parts is not None and self._has_own_store:
            await self._parts.store.aclose()
            self._parts = None

    @property
    def _open(self) -> Parts:
        if self._parts is None:
            raise WrongState("the manager is not open: enter it with `async with`")
        return self._parts

    # for other parts of skerry

    @property
    def store(self) -> Store:
        return self._open.store

    @property
    def handles(self) -> Handles:
        """Its handles, and what they need of the registry."""
        return self._open.handles

    @property
    def repair(self) -> Repair:
        return self._open.repair

    @property
    def is_remote(self) -> bool:
        """Whether a server does its work; then there is neither registry nor host here."""
        return False

    def provider(self, name: str) -> Provider:
        return self._providers.get(name)

    def owns(self, volume: Volume) -> bool:
        """Whether a volume is of this registry: another one's on the same engine are not ours to remove."""
        return volume.instance in ("", self.store.instance)

    def loaded_provider(self, name: str) -> Provider | None:
        """A provider that was used already; None if it was not."""
        return self._providers.loaded(name)

    async def providers_with(self, capability: str) -> list[str]:
        """Names of those that have a capability, of all that were ever used and the default one."""
        return [each.name for each in await self._providers.having(Capability(capability), self.store, None)]

    def set_limits(self, config: Config) -> None:
        """Have other limits from now on: of sandboxes, of boots at once, and of the memory that stays free."""
        self._open.creator.config = config

    def complete(self, spec: Spec | None, options: SpecOptions) -> Spec:
        """A spec, or one from keywords, with the configuration's values where nothing is said."""
        if spec is not None and options:
            raise InvalidSpec("give a spec or its fields, not both")
        return self.config.spec(options) if spec is None else self.config.complete(spec)

    def end_overdue(self) -> None:
        """End what has outlived its lifetime, beside all else; opening with `reconcile` has done so, and waited."""
        if self._timekeeper is not None:
            self._timekeeper.look_in(0.0)

    def _seen(self, record: Record) -> None:
        if self._timekeeper is not None:
            self._timekeeper.look_in(due_in(record, self.store.now()))

    async def pause(self, reference: str, *, save: bool = False) -> None:
        """Freeze it, where the provider can; to `save` its memory in files ends its processes until it is resumed."""
        await self._open.power.pause(reference, save=save)

    async def resume(self, reference: str) -> None:
        """Let one go on that is paused or asleep."""
        await self._open.power.resume(reference)

    async def stop(self, reference: str, timeout_s: float | None = None) -> None:
        """End its processes and keep its files, where the provider can. Its lifetime goes on. Processes get SIGTERM and
        `timeout_s` to end, 5 s if nothing is said; then, or at once if that is 0, they are killed."""
        await self._open.power.stop(reference, timeout_s)

    async def start(self, reference: str, env: Mapping[str, str] | None = None) -> None:
        """Start a stopped one again, for what is left of its lifetime. Its environment is kept nowhere: give it again,
        if it needs one."""
        await self._open.power.start(reference, env)

    async def snapshot(self, reference: str, name: str, *, with_memory: bool = False) -> Snapshot:
        """Keep its files as they are now; `with_memory` its processes and volume too, and copies go on from there."""
        return await self._open.storage.snapshot(reference, name, with_memory=with_memory)

    async def snapshots(self, provider: str | None = None) -> list[Snapshot]:
        """All there are, the oldest first; those of one provider, or of all that have any."""
        return await self._open.storage.snapshots(provider)

    async def remove_snapshot(self, name: str, provider: str | None = None) -> None:
        """Remove a snapshot. Raises Conflict while a sandbox is made of it."""
        await self._open.storage.remove_snapshot(name, provider)

    async def restore(self, reference: str, snapshot: str, env: Mapping[str, str] | None = None) -> AsyncSandbox:
        """Make its box anew from a snapshot, under the same id and with its volumes. What it was since is gone; its
        environment is kept nowhere: give it again, if it needs one. If that is cut short, it is lost until it is
        restored again."""
        return await self._open.storage.restore(reference, snapshot, env)

    async def fork(self, reference: str, *, with_memory: bool = False, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        """Another sandbox with the same files, `with_memory` with all that runs too, and a data volume of its own;
        `options` change what it is. It has no name and no environment but those given."""
        return (await self._open.storage.fork(reference, 1, with_memory=with_memory, **options))[0]

    async def fork_many(
        self, reference: str, count: int, *, with_memory: bool = False, **options: Unpack[SpecOptions]
    ) -> list[AsyncSandbox]:
        """So many of one moment, or none."""
        return await self._open.storage.fork(reference, count, with_memory=with_memory, **options)

    async def volumes(
        self, kind: str | None = None, *, sizes: bool = False, provider: str | None = None
    ) -> list[Volume]:
        """All there are, by name: those of a kind (`data` or `cache`), of one provider, or of all that have any. Their
        sizes take longer."""
        return await self._open.storage.volumes(kind, provider, sizes=sizes)

    async def remove_volume(self, name: str, provider: str | None = None) -> None:
        """Remove a volume and all that is in it. Raises Conflict while a sandbox uses it."""
        await self._open.storage.remove_volume(name, provider)

    # images: `provider` names one whose boxes are made of images; without it the configuration does

    async def images(self, *, provider: str | None = None) -> Sequence[Image]:
        """All that sandboxes can be made of, the newest first."""
        return await self._images.of(provider).images()

    async def build_base_image(
        self,
        dockerfile: str | Path = "",
        *,
        provider: str | None = None,
        builder: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[BuildOptions],
    ) -> Image:
        """Build an image from the text of a Dockerfile, or from the file at a Path; for machines also by a `recipe`.

        Without a `context` its COPY finds nothing; without a `name` it is called after the text or the recipe. Its RUN
        steps have no network unless that is `bridge`, and 2G of `memory`. `builder` is a provider that runs them in the
        place of `provider`, which imports what comes of it: `vmdocker` does so in a machine of their own. Machines and
        Incus build nothing themselves: Docker, Podman or Buildah does for them, the first that is there.
        """
        return await self._images.build(build_of(dockerfile, options), provider, builder, on_progress or silent)

    async def pull_image(
        self, name: str, *, provider: str | None = None, on_progress: OnProgress | None = None
    ) -> Image:
        """Get an image from its registry."""
        return await self._images.of(provider).pull_image(name, on_progress or silent)

    async def import_image(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        provider: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Make an image of an image archive, an OCI layout or a root file system; each may be a folder or a tar."""
        return await self._images.of(provider).import_image(Path(source), name, on_progress or silent)

    async def remove_image(self, name: str, *, force: bool = False, provider: str | None = None) -> None:
        """Raises Conflict, which names the sandboxes, while one is made of it. `force` takes all its names."""
        await self._images.of(provider).remove_image(name, force=force)

    async def kernels(self, *, provider: str | None = None) -> Sequence[KernelInfo]:
        """The kernels of machines: our own first, then the newest."""
        return self._images.kernels(provider).all()

    async def fetch_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        """Get the newest of Debian's kernels for machines."""
        return await self._images.fetch_kernel(provider, on_progress or silent)

    async def build_kernel(self, *, provider: str | None = None, on_progress: OnProgress | None = None) -> KernelInfo:
        """Build a kernel for machines from Debian's source, which takes long; it boots faster and needs no modules."""
        return await self._images.build_kernel(provider, on_progress or silent)

    async def remove_kernel(self, key: str, *, provider: str | None = None) -> None:
        """Machines that run keep what they have read of it."""
        self._images.kernels(provider).remove(key)

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
        whole = self.complete(spec, options)
        return self.handles.of(await self.handles.make(id or new_id(), whole, ephemeral=ephemeral, key=key))

    async def create_default(self) -> AsyncSandbox:
        """A sandbox as the configuration has it."""
        return await self.create()

    async def register(self, sandbox: AsyncSandbox) -> AsyncSandbox:
        """Take a sandbox that was made elsewhere into the registry. If that is refused it stays the caller's."""
        return self.handles.of(await self.handles.adopt(sandbox.id, sandbox.spec, sandbox.enforced))

    async def get(self, reference: str) -> AsyncSandbox:
        """A sandbox by its id, the beginning of it, or its name."""
        return self.handles.of(await self.handles.live_record(reference))

    async def record(self, reference: str) -> Record:
        """The registry's record of it, also when it has ended."""
        return await self.store.find(reference)

    async def refresh(self, filter: Filter = ALL) -> Sequence[str]:
        """Ask the hosts of those that fit how they are, and follow that; the providers that did not answer."""
        records = await self.list(filter)
        return await self.repair.refresh(record.spec.provider for record in records if record.is_live)

    async def list(self, filter: Filter = ALL) -> list[Record]:
        """Those that fit, oldest first, as the registry has them; `refresh` before it asks their hosts."""
        return await self.store.list(filter)

    async def count(self, filter: Filter = ALL) -> int:
        """The number of those that fit."""
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
        """The files in a folder of it."""
        return await (await self.get(reference)).files.list(path, depth=depth)

    async def is_healthy(self, reference: str) -> bool:
        """Whether its agent answers, now; a busy one does too."""
        try:
            return await (await self.get(reference)).is_healthy()
        except SkerryError:
            return False

    async def destroy(
        self, reference: str, *, volumes: bool = False, cause: Cause = Cause.USER, grace_s: float | None = None
    ) -> None:
        """End a sandbox and remove all of it. Quiet if it has ended; safe while it is being made. Its processes get
        SIGTERM and `grace_s` to end, 2 s if nothing is said and the `cause` is the user; 0 kills them at once."""
        await self.handles.destroy(reference, volumes=volumes, cause=cause, grace_s=grace_s)

    async def destroy_all(
        self, filter: Filter = ALL, *, volumes: bool = False, grace_s: float | None = None
    ) -> Sequence[Outcome]:
        """End all that fit, in parallel, as well as it goes; each failure is told. Safe while creates run."""
        ids = [record.id for record in await self.list(filter)]
        return await self.handles.destroy_all(ids, volumes=volumes, grace_s=grace_s)

    async def explain(self, reference: str) -> Explanation:
        """Tell when it will end and why, or why it did."""
        record = await self.repair.look(await self.record(reference))
        return await explain(record, self.handles.of(record), self.store.now())

    async def set_lifetime(
        self, reference: str, lifetime: float | str | None = None, idle: float | str | None = None
    ) -> None:
        """Change when it ends by itself, counted from now; None is never."""
        await self.handles.of(await self.record(reference)).set_lifetime(lifetime, idle)

    async def wait(self, reference: str, states: set[State] | None = None, timeout_s: float | None = None) -> Record:
        """Wait until it is in one of `states`; without any, until it has ended. Raises if it never will be."""
        id = (await self.record(reference)).id
        async with asyncio.timeout(timeout_s):
            return await self._open.watch.until(id, states)

    async def look_after(self, reference: str) -> Record:
        """See what the host says of one sandbox, follow that, and tell what is known of it then."""
        record = await self.record(reference)
        await self.repair.sandbox(record, answer_s=GLANCE_S)
        return await self.store.get(record.id)

    async def events(self, *, after: int = 0, follow: bool = False, sandbox: str | None = None) -> AsyncIterator[Event]:
        """All that happened after a place in the order, and with `follow` all that will, also what others do to boxes
        by hand, where the provider tells."""
        id = None if sandbox is None else (await self.record(sandbox)).id
        async with aclosing(self._open.watch.events(after, id, follow=follow)) as events:
            async for event in events:
                yield event

    async def follow(self) -> None:
        """Until it is cancelled: what others do to boxes is written down when it happens, where the provider tells."""
        await self._open.watch.follow()

    async def logs(self, reference: str, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        """The log of the box itself, such as its agent's last words, where the provider keeps it."""
        record = await self.record(reference)
        box: HasLogs = require_capability(self.provider(record.spec.provider), Capability.LOGS)
        async for chunk in box.logs(record.id, follow=follow, tail=tail):
            yield chunk

    async def prune(self, *, older_s: float = 86400.0) -> int:
        """Forget what ended longer ago than that; how many records."""
        return await self.store.prune(before=time.time() - older_s)

    async def reconcile(self, *, dry_run: bool = False, rebuild: bool = False) -> Sequence[Verdict]:
        """Compare the registry with every provider it speaks of and the default one, and repair the difference. With
        `rebuild`, what runs on an image that has a newer one by its name is made anew; volumes are kept."""
        names = await self._providers.names(self.store)
        found = [await self.repair.provider(name, dry_run=dry_run, rebuild=rebuild) for name in names]
        return [verdict for verdicts in found for verdict in verdicts]
