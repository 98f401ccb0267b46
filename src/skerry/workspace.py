"""The folder of work that a sandbox begins with: shown, copied, or cloned on the host and then copied."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from skerry import git, lifecycle, transfers
from skerry.agent.client import AgentClient
from skerry.errors import CreateFailed, InvalidSpec, SkerryError
from skerry.host import folders, locks
from skerry.providers.base import Provider
from skerry.spec import Mount, SandboxId, Spec, Workspace

PLACE = "/home/user/workspace"
_GREETING_S = 10.0
_PREFIX = "skerry-workspace-"
_ABANDONED_S = 3600.0
"""Longer than a clone may take."""


def for_box(spec: Spec) -> Spec:
    """What the provider is asked for: it knows of mounts and of the folder to start in, not of workspaces."""
    workspace = spec.workspace
    if workspace is None:
        return spec
    _check(workspace)
    shown = workspace.path is not None and not workspace.copy
    mounts = (Mount(source=workspace.path, target=PLACE), *spec.mounts) if shown and workspace.path else spec.mounts
    return msgspec.structs.replace(spec, workspace=None, mounts=mounts, cwd=spec.cwd or PLACE)


class Work:
    """The workspace of a sandbox that is being made."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        """What was asked for, and which commit that turned out to be."""
        self._clone: Path | None = None
        self._lock: int | None = None

    async def fetch(self) -> None:
        """All that can fail without a box."""
        workspace = self.spec.workspace
        if workspace is None:
            return
        commit = workspace.commit
        if workspace.path is None and workspace.source is not None:
            await lifecycle.run_to_end(asyncio.to_thread(self._make_room))
            assert self._clone is not None
            commit = await git.clone(workspace.source, commit, self._clone)
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
        folders.remove_abandoned(self._clone.parent, _PREFIX, lambda made_at: time.time() - made_at > _ABANDONED_S)

    async def make_box(self, provider: Provider, id: SandboxId, *, keep_volumes: bool = False) -> None:
        """The box with the work in it, or nothing of either."""
        await lifecycle.create_or_nothing(provider, id, for_box(self.spec), keep_volumes=keep_volumes)
        workspace = self.spec.workspace
        tree = self._clone
        if workspace is not None and workspace.path is not None and workspace.copy:
            tree = Path(workspace.path)
        if tree is None:
            return
        try:
            await _fill(provider, id, tree)
            await self.forget()
        except BaseException:
            volumes = self.spec.name is None and not keep_volumes
            await lifecycle.run_to_end(provider.destroy(id, volumes=volumes))
            raise

    async def forget(self) -> None:
        """Remove what was cloned on the host. Quiet if that has happened already."""
        folder, self._clone = self._clone, None
        lock, self._lock = self._lock, None
        if folder is not None:
            await lifecycle.run_to_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
        if lock is not None:
            os.close(lock)


@asynccontextmanager
async def opened(spec: Spec) -> AsyncIterator[Work]:
    """The workspace of a spec, ready to be put into a box; what it took on the host goes at the end."""
    work = Work(spec)
    try:
        await work.fetch()
        yield work
    finally:
        await work.forget()


def _check(workspace: Workspace) -> None:
    if workspace.source is not None:
        git.check_source(workspace.source)
    if workspace.commit is not None:
        git.check_commit(workspace.commit)
    if workspace.path is not None and not os.path.isdir(workspace.path):
        raise InvalidSpec(f"workspace: {workspace.path!r} is no folder of this host", field="workspace")


async def _fill(provider: Provider, id: SandboxId, tree: Path) -> None:
    client = await AgentClient.greet(await provider.dial(id), timeout_s=_GREETING_S)
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
