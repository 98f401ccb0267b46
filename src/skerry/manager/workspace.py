"""The folder of work that a sandbox begins with: shown, copied, or cloned on the host and then copied."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from skerry import aio
from skerry.agent import transfers
from skerry.agent.client import AgentClient
from skerry.errors import CreateFailed, InvalidSpec, SkerryError
from skerry.host import folders, locks
from skerry.manager import git
from skerry.model.spec import Mount, SandboxId, Spec
from skerry.providers.base import Provider

PLACE = "/home/user/workspace"
_PREFIX = "skerry-workspace-"
_ABANDONED_S = 3600.0
"""Longer than a clone may take."""
_log = logging.getLogger("skerry.manager")


def for_box(spec: Spec) -> Spec:
    """The spec for the provider, who knows of mounts and of the folder to start in, not of workspaces."""
    workspace = spec.workspace
    if workspace is None:
        return spec
    if workspace.source is not None:
        git.check_source(workspace.source)
        if workspace.public:
            git.check_public(workspace.source)
    if workspace.commit is not None:
        git.check_commit(workspace.commit)
    if workspace.path is not None and not os.path.isdir(workspace.path):
        raise InvalidSpec(f"workspace: {workspace.path!r} is no folder of this host", field="workspace")
    shown = workspace.path is not None and not workspace.copy
    mounts = (Mount(source=workspace.path, target=PLACE), *spec.mounts) if shown and workspace.path else spec.mounts
    return msgspec.structs.replace(spec, workspace=None, mounts=mounts, cwd=spec.cwd or PLACE)


class Work:
    """The workspace of a sandbox that is being made."""

    def __init__(self, spec: Spec, holds: int | None = None) -> None:
        """`holds` is the most bytes that its box can have: more is not cloned."""
        self.spec = spec
        """The spec that was asked for, with the commit that was found."""
        self._holds = holds
        self._clone: Path | None = None
        self._lock: int | None = None

    async def fetch(self) -> None:
        """All that can fail without a box."""
        workspace = self.spec.workspace
        if workspace is None:
            return
        commit = workspace.commit
        if workspace.path is None and workspace.source is not None:
            await aio.run_to_end(asyncio.to_thread(self._make_room))
            assert self._clone is not None
            most = git.MOST if self._holds is None else self._holds
            commit = await git.clone(workspace.source, commit, self._clone, most=most, public=workspace.public)
        elif workspace.path is not None and workspace.source is not None and commit is None:
            commit = await git.head_of(workspace.path)
        self.spec = msgspec.structs.replace(self.spec, workspace=msgspec.structs.replace(workspace, commit=commit))

    def _make_room(self) -> None:
        """A folder to clone into, which is ours for as long as we live; what the dead have left is removed."""
        try:
            self._clone = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = os.open(self._clone, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.take(self._lock)
        except OSError as error:
            raise CreateFailed(f"there is no room to clone into: {error.strerror or error}") from error
        folders.sweep(self._clone.parent, _PREFIX, _ABANDONED_S)

    async def fill(self, provider: Provider, id: SandboxId) -> None:
        """Copy the work into a box that was made, and remove what was cloned for that. Raises CreateFailed."""
        workspace = self.spec.workspace
        tree = self._clone
        if workspace is not None and workspace.path is not None and workspace.copy:
            tree = Path(workspace.path)
        if tree is None:
            return
        client = await AgentClient.greet(await provider.dial(id))
        try:
            await client.call("make_dir", {"path": PLACE, "parents": True}, type=dict[str, Any])
            await transfers.upload_tree(client, tree, {"path": PLACE})
        except SkerryError as error:
            raise CreateFailed(f"the workspace could not be copied into the box: {error}") from error
        except OSError as error:
            what = os.fsdecode(error.filename) if error.filename is not None else str(tree)
            raise CreateFailed(f"the workspace could not be read: {what}: {error.strerror}") from error
        finally:
            client.close()
        await self.forget()

    async def forget(self) -> None:
        """Remove what was cloned on the host. Quiet if that has happened already."""
        folder, self._clone = self._clone, None
        lock, self._lock = self._lock, None
        if folder is not None:
            try:
                await aio.run_to_end(asyncio.to_thread(folders.remove, folder))
            except OSError as error:
                _log.warning("the clone at %s is left behind: %s", folder, error)
        if lock is not None:
            os.close(lock)


@asynccontextmanager
async def opened(spec: Spec, holds: int | None = None) -> AsyncIterator[Work]:
    """The workspace of a spec, ready to be put into a box that holds so many bytes; what it took on the host goes at
    the end."""
    work = Work(spec, holds)
    try:
        await work.fetch()
        yield work
    finally:
        await work.forget()
