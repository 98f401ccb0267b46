"""Builds of templates: a sandbox of the base, in which the steps are done, and whose files are then kept as a snapshot.

A template is a snapshot, what its sandboxes begin with, and the tags that name it. So all that a build may do is what a
sandbox may, on every provider that has snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skerry import providers
from skerry.aio import end
from skerry.errors import Conflict, LimitReached, NotFound, NotPermitted, SkerryError, Unsupported
from skerry.model.templates import Template
from skerry.surfaces.e2b.answers import kind_of
from skerry.surfaces.e2b.kept import KeptBuild, KeptTemplate, Tag
from skerry.surfaces.e2b.names import TAG
from skerry.surfaces.e2b.steps import Files, Stage, Step, StepFailed

if TYPE_CHECKING:
    from skerry.model.spec import SpecOptions
    from skerry.surfaces.e2b.route import Call
    from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")
TEMPLATES, BUILDS = "e2b-template", "e2b-build"
BASE_IMAGES = frozenset({"e2bdev/base", "e2bdev/base:latest"})
"""E2B's own image, which stands for the template `base` here."""
STEP_FAILED: Mapping[str, Any] = {"error_code": "step_failed", "retryable": False, "infrastructure": False}
"""What a build is that its own steps made fail."""
SERVER_FAILED: Mapping[str, Any] = {"error_code": "server_failed", "retryable": False, "infrastructure": True}
SERVER_ENDED: Mapping[str, Any] = {"error_code": "server_ended", "retryable": True, "infrastructure": True}
_MOST_LOGS = 2000
_MOST_AT_ONCE = 4
_MOST = 64
"""Builds that are under way, or wait for their turn."""
_BUILD_S = 3600.0
_READY_S = 300.0
_POLL_S = 0.2


class Order(msgspec.Struct, frozen=True, rename="camel"):
    """What is to be built, as a client sends it."""

    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool = False
    steps: tuple[Step, ...] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None


class Builds:
    """The builds of a server, and what came of them."""

    def __init__(self, server: Server) -> None:
        store = server.manager.store
        self.templates = store.documents(TEMPLATES, KeptTemplate)
        self.builds = store.documents(BUILDS, KeptBuild)
        self.files = Files(Path(server.config.state_dir) / "e2b" / "files")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, list[str]] = {}
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        server.on_close.append(self.aclose)

    async def aclose(self) -> None:
        await end(*self._running.values())

    async def request(self, name: str, tags: Sequence[str], cpus: float, memory_mb: int, call: Call) -> tuple[str, str]:
        """A template of that name, made if there is none yet, and a new build of it: their ids."""
        for document in await call.templates.built(call):
            if document.body.name == name and document.project == call.project:
                template = document.id
                body = msgspec.structs.replace(document.body, cpus=cpus, memory_mb=memory_mb)
                await self.templates.replace(template, body)
                break
        else:
            template = uuid.uuid4().hex[:20]
            kept = KeptTemplate(name=name, cpus=cpus, memory_mb=memory_mb)
            await self.templates.add(template, kept, project=call.project)
        build = str(uuid.uuid4())
        await self.builds.add(build, KeptBuild(template=template, tags=tuple(tags)), project=call.project)
        return template, build

    async def start(self, build: str, order: Order, call: Call) -> None:
        """Begin a build. Raises LimitReached, Conflict if it was begun, NotFound for a base that there is not, and
        Unsupported where the base's provider has no snapshots."""
        if len(self._running) >= _MOST:
            raise LimitReached(f"{_MOST} builds are under way: wait for some to end")
        kept = (await self.builds.get(build)).body
        if kept.status != "waiting":
            raise Conflict("this build was started already")
        name, options, base = await self._base(order, call)
        provider = call.manager.complete(None, options).provider
        if "snapshot" not in (call.manager.loaded_provider(provider) or providers.provider_class(provider)).honours:
            raise Unsupported("templates", provider, "a build is kept as a snapshot, and it has none; docker does")
        self._logs[build] = []
        await self._note(build, status="building", base=name)
        task = asyncio.create_task(self._run(build, order, options, base, call), name=f"skerry-e2b-build-{build}")
        self._running[build] = task
        task.add_done_callback(lambda _: self._running.pop(build, None))

    def logs(self, build: str, kept: KeptBuild) -> Sequence[str]:
        """What a build has said so far."""
        return self._logs.get(build, kept.logs)

    def is_running(self, build: str) -> bool:
        return build in self._running

    async def _base(self, order: Order, call: Call) -> tuple[str, SpecOptions, Template]:
        """The template of the configuration on which a build stands, and what its sandbox is made of."""
        if order.from_template or (order.from_image or "") in BASE_IMAGES:
            found = await call.templates.find(order.from_template or "base", call)
            return found.base, found.options(), found.template
        found = await call.templates.find("base", call)
        options = found.options()
        if order.from_image:
            if order.from_image.startswith((".", "/")):
                raise NotPermitted("fromImage: files of the host are its owner's alone")
            options["image"] = order.from_image
        return found.base, options, found.template

    async def _run(self, build: str, order: Order, options: SpecOptions, base: Template, call: Call) -> None:
        """Build, and write down what came of it."""
        try:
            async with self._turns, asyncio.timeout(_BUILD_S):
                await self._build(build, order, options, base, call)
        except StepFailed as error:
            await self._fail(build, str(error), STEP_FAILED)
        except SkerryError as error:
            await self._fail(build, error.message, kind_of(error))
        except TimeoutError:
            await self._fail(build, f"the build took longer than {_BUILD_S:g} s", STEP_FAILED)
        except asyncio.CancelledError:
            await self._fail(build, "the server ended during the build", SERVER_ENDED)
            raise
        except Exception as error:
            _log.error("build %s failed", build, exc_info=error)
            await self._fail(build, "the server failed; its log has more", SERVER_FAILED)

    async def _build(self, build: str, order: Order, options: SpecOptions, base: Template, call: Call) -> None:
        log = self._logs[build]

        def tell(line: str) -> None:
            if len(log) < _MOST_LOGS:
                log.append(line[:4000])

        allow = base.allow
        if allow and "network" not in options:
            options = {**options, "network": "rules", "allow": allow}
        options = {**options, "admin": True}  # as with a Dockerfile, steps install things and change owners
        options.pop("user", None)
        spec = call.manager.complete(None, {**options, "lifetime": _BUILD_S + 60, "idle": None})
        sandbox = await call.manager.create(spec)
        try:
            stage = Stage(sandbox, tell, base.user)
            if order.from_image and order.from_image not in BASE_IMAGES:
                await stage.provision()
            for number, step in enumerate(order.steps, 1):
                await self._note(build, step=str(number))
                tell(f"[{number}/{len(order.steps)}] {step.type} {' '.join(step.args)}")
                path = self.files.path(call.project, step.files_hash) if step.files_hash else None
                if path is None or not path.exists():
                    await stage.do(step, None)
                    continue
                with path.open("rb") as archive:
                    await stage.do(step, archive)
            await self._note(build, step="finalize")
            await self._make_ready(sandbox, stage, order)
            await call.manager.snapshot(sandbox.id, build)
        finally:
            with suppress(SkerryError):
                await call.manager.destroy(sandbox.id, grace_s=0.0)
        tell("the template is ready")
        found = {"provider": spec.provider, "user": stage.user, "cwd": stage.cwd, "env": stage.env}
        kept = await self._note(build, status="ready", step="", logs=tuple(log), command=order.start_cmd or "", **found)
        self._logs.pop(build, None)
        await self.tag(kept.template, kept.tags or (TAG,), build)

    async def _make_ready(self, sandbox: Any, stage: Stage, order: Order) -> None:
        """See that what is started in each sandbox starts, and wait until it is ready. Raises StepFailed."""
        started = None
        if order.start_cmd:
            command = ["/bin/bash", "-l", "-c", order.start_cmd]
            started = await sandbox.start(command, user=stage.user, cwd=stage.cwd or None, env=stage.env)
        try:
            async with asyncio.timeout(_READY_S):
                while order.ready_cmd:
                    if (await stage.run(order.ready_cmd, stage.user, quiet=True)).ok:
                        break
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StepFailed(f"it was not ready within {_READY_S:g} s: {order.ready_cmd}") from None
        finally:
            if started is not None:
                await started.detach()

    async def tag(self, template: str, tags: Sequence[str], build: str) -> None:
        """Have tags of a template name a build."""
        while True:
            found = await self.templates.get(template)
            new = {tag: Tag(build, time.time()) for tag in tags}
            body = msgspec.structs.replace(found.body, tags={**found.body.tags, **new})
            with suppress(Conflict):
                await self.templates.replace(template, body, version=found.version)
                return

    async def untag(self, template: str, tags: Sequence[str]) -> None:
        found = await self.templates.get(template)
        left = {name: tag for name, tag in found.body.tags.items() if name not in tags}
        await self.templates.replace(template, msgspec.structs.replace(found.body, tags=left), version=found.version)

    async def _note(self, build: str, **fields: Any) -> KeptBuild:
        found = await self.builds.get(build)
        return (await self.builds.replace(build, msgspec.structs.replace(found.body, **fields))).body

    async def _fail(self, build: str, reason: str, kind: Mapping[str, Any]) -> None:
        logs = self._logs.pop(build, [])
        with suppress(NotFound):
            await self._note(build, status="error", reason=reason, kind=dict(kind), logs=tuple(logs))
