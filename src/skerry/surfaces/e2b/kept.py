"""What is kept of a sandbox beside its record: that which E2B knows of it and the manager does not."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

from skerry.store.documents import Collection, Document

T = TypeVar("T")
_PAGE = 1000
KIND = "e2b"


class Network(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a request says of a sandbox's network, in E2B's words."""

    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    allow_public_traffic: bool = True
    """Whether anybody may reach its ports who knows their names; else it takes its traffic token."""
    mask_request_host: str | None = None
    """What its ports get as Host, `${PORT}` being the port."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox as E2B knows it. Nothing in it is secret: tokens are derived, and environments are kept nowhere."""

    template: str
    """The id of the template or snapshot that it was made of."""
    alias: str = ""
    metadata: dict[str, str] = {}
    timeout_s: float = 300.0
    started_at: float = msgspec.field(default_factory=time.time)
    ends_at: float = 0.0
    """When it is killed, or paused, by itself."""
    auto_pause: bool = False
    pauses_memory: bool = True
    """Whether a pause by itself keeps its processes."""
    auto_resume: bool = False
    """Whether a request for one of its ports resumes it."""
    user: str = "user"
    """Whose commands and files are those of calls that name no user."""
    secure: bool = True
    internet: bool | None = None
    network: Network = Network()
    paused: bool = False
    """Whether it is meant to be paused. Its record may say so a moment later."""

    def begun(self) -> Kept:
        """The same, begun now: to the millisecond, so that a client that sends the time back means this one."""
        now = int(time.time() * 1000) / 1000
        return msgspec.structs.replace(self, started_at=now, ends_at=now + self.timeout_s)

    def is_over(self, now: float) -> bool:
        """Whether its time is over, so that it is to be killed or paused."""
        return not self.paused and now >= self.ends_at


class KeptSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot, and what sandboxes are that are made of it."""

    sandbox: str
    """The sandbox that it was taken of, as E2B names it."""
    template: str
    """The template of the sandbox that it was taken of."""
    provider: str
    names: tuple[str, ...] = ()
    created_at: float = msgspec.field(default_factory=time.time)


async def every(collection: Collection[T]) -> list[Document[T]]:
    """All documents of a collection."""
    found: list[Document[T]] = []
    while page := await collection.list(after=found[-1].id if found else "", limit=_PAGE):
        found += page
        if len(page) < _PAGE:
            break
    return found


class KeptTemplate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A template that somebody built, by its id."""

    name: str
    tags: dict[str, Tag] = {}
    cpus: float = 0.0
    memory_mb: int = 0


class Tag(msgspec.Struct, frozen=True):
    """A tag, and the build that it names."""

    build: str
    at: float


class KeptBuild(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a build: a snapshot, and what sandboxes of it begin with."""

    template: str
    status: str = "waiting"
    """waiting, building, ready or error, as E2B says."""
    tags: tuple[str, ...] = ()
    """Those that it gets when it is ready."""
    reason: str = ""
    kind: dict[str, Any] = {}
    """What sort of failure that is."""
    step: str = ""
    logs: tuple[str, ...] = ()
    base: str = ""
    """The configuration's template whose sandbox it was made in."""
    provider: str = ""
    user: str = "user"
    cwd: str = ""
    env: dict[str, str] = {}
    command: str = ""
    """What is started in each of its sandboxes."""
    at: float = msgspec.field(default_factory=time.time)
