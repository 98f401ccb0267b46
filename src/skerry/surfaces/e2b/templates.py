"""Templates and snapshots by the names that E2B's clients have for them: what a sandbox is that is made of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from skerry.errors import NotFound
from skerry.model.spec import SpecOptions
from skerry.model.templates import BASE, Template
from skerry.store.documents import Document
from skerry.surfaces.e2b.builds import Builds
from skerry.surfaces.e2b.kept import KeptBuild, KeptSnapshot, KeptTemplate, every
from skerry.surfaces.e2b.names import TAG, is_called

if TYPE_CHECKING:
    from skerry.surfaces.e2b.route import Call
    from skerry.surfaces.server.server import Server

SNAPSHOTS = "e2b-snapshot"
_DEFAULT = "base"
_INTERPRETER = "code-interpreter-v1"
"""The template that the SDK of the code interpreter asks for: the same as `base`, unless the settings have another."""
_DEEPEST = 32


class Found(msgspec.Struct, frozen=True):
    """A template, as a sandbox of it is to be."""

    id: str
    alias: str
    template: Template
    base: str
    """The configuration's template on which it stands."""
    snapshot: str = ""
    cwd: str = ""

    @property
    def user(self) -> str:
        return self.template.user

    @property
    def allow(self) -> tuple[str, ...]:
        return self.template.allow

    @property
    def has_files(self) -> bool:
        """Whether its sandboxes begin with files of its own, and not with those of the host alone."""
        return bool(self.snapshot or self.template.image or self.template.snapshot)

    def options(self) -> SpecOptions:
        """What it says of a spec, but for rules, of which a request may want less."""
        options = self.template.options()
        options.pop("allow", None)
        if self.snapshot:
            options.pop("image", None)
            options["snapshot"] = self.snapshot
        if self.cwd:
            options["cwd"] = self.cwd
        return options


class Templates:
    """The templates of the configuration, those that were built, and snapshots, which are used as ones."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.builds = Builds(server)
        self.snapshots = server.manager.store.documents(SNAPSHOTS, KeptSnapshot)

    async def find(self, name: str, call: Call, *, depth: int = 0) -> Found:
        """A template or snapshot by its id or name. Raises NotFound for what is not there, or another tenant's."""
        missing = NotFound(f"template {name[:100]!r} was not found")
        if depth > _DEEPEST:
            raise missing
        plain = name.rpartition("/")[2].partition(":")[0]
        known = {_DEFAULT: BASE, **self._server.config.templates}
        known.setdefault(_INTERPRETER, known[_DEFAULT])
        if plain in known:
            return Found(plain, plain, known[plain], plain)
        if (built := await self.find_built(name, call)) is not None:
            return await self._of_build(*built, call, depth)
        if (snapshot := await self.snapshot(name, call)) is not None:
            source = await self.find(snapshot.body.template, call, depth=depth + 1)
            template = msgspec.structs.replace(source.template, provider=snapshot.body.provider)
            return Found(snapshot.id, "", template, source.base, snapshot.id, source.cwd)
        raise missing

    async def _of_build(self, document: Document[KeptTemplate], id: str, call: Call, depth: int) -> Found:
        build: KeptBuild = (await self.builds.builds.get(id)).body
        source = await self.find(build.base, call, depth=depth + 1)
        kept = document.body
        shell: tuple[str, ...] = ("/bin/bash", "-l", "-c", build.command)
        if source.template.admin and build.user != "root":  # whose the box is
            shell = ("runuser", "-u", build.user, "--", *shell)
        command = shell if build.command else ()
        more = {"cpus": kept.cpus, "memory": kept.memory_mb << 20, "command": command, "user": build.user}
        template = msgspec.structs.replace(
            source.template,
            provider=build.provider,
            env={**source.template.env, **build.env},
            **{name: value for name, value in more.items() if value},
        )
        return Found(document.id, kept.name, template, source.base, id, build.cwd)

    async def find_built(self, name: str, call: Call) -> tuple[Document[KeptTemplate], str] | None:
        """A template that was built, and the build that the name means; None if there is none, or it is not ready."""
        plain, _, tag = name.rpartition("/")[2].partition(":")
        for document in await self.built(call):
            if plain in (document.id, document.body.name):
                named = document.body.tags.get(tag or TAG)
                if named is None and not tag and document.body.tags:
                    named = max(document.body.tags.values(), key=lambda each: each.at)
                return None if named is None else (document, named.build)
        return None

    async def built(self, call: Call) -> list[Document[KeptTemplate]]:
        """All that they built."""
        tenant = call.principal.tenant
        return [each for each in await every(self.builds.templates) if tenant in (None, each.project)]

    async def snapshot(self, name: str, call: Call) -> Document[KeptSnapshot] | None:
        """A snapshot of theirs, by its id or a name, the newest if several have that."""
        found = [each for each in await self.all_snapshots(call) if is_called(each.id, each.body.names, name)]
        return max(found, key=lambda each: each.body.created_at, default=None)

    async def all_snapshots(self, call: Call) -> list[Document[KeptSnapshot]]:
        """All of theirs."""
        tenant = call.principal.tenant
        return [each for each in await every(self.snapshots) if tenant in (None, each.project)]

    async def allowed(self, name: str, call: Call) -> tuple[str, ...]:
        """What sandboxes of a template may reach by themselves: nothing, if it is gone."""
        try:
            return (await self.find(name, call)).allow
        except NotFound:
            return ()
