"""What answers show: records without what is nobody's business, and pages of long lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from skerry.errors import InvalidSpec
from skerry.model.records import Cause, Record, shown_snapshot
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.model.tenants import Principal

MAX_PAGE = 1000
_encode = msgspec.json.Encoder().encode


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as the registry has it. Values of its environment are in no answer."""

    id: SandboxId
    name: str | None
    state: State
    provider: str
    project: str
    labels: dict[str, str]
    addresses: dict[str, str | None]
    """Address on the server's loopback of each port of its spec."""
    ends_at: float | None
    """Seconds since 1970; null if it has no end, or has ended."""
    created_at: float
    updated_at: float
    version: int
    """Grows with every change; also the ETag."""
    cause: Cause | None
    """Why it ended."""
    detail: str
    doomed: bool
    """It is being destroyed."""
    ephemeral: bool
    spec: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
    enforced: dict[str, Any]
    """How each limit is held, or why it is not."""

    @classmethod
    def of(cls, record: Record, principal: Principal) -> SandboxView:
        return cls(
            id=record.id,
            name=record.name,
            state=record.state,
            provider=record.spec.provider,
            project=record.spec.project,
            labels=record.spec.labels,
            addresses={str(port.port): port.address for port in record.spec.ports},
            ends_at=record.ends_at if record.is_live else None,
            created_at=record.created_at,
            updated_at=record.updated_at,
            version=record.version,
            cause=record.cause,
            detail=record.detail,
            doomed=record.doomed,
            ephemeral=record.ephemeral,
            spec=_spec_json(record.spec, principal),
            enforced=record.enforced,
        )


def _spec_json(spec: Spec, principal: Principal) -> msgspec.Raw:
    """`spec_view`, as it is sent: a long list is mostly specs."""
    return msgspec.Raw(_encode(spec if spec.snapshot is None else spec_view(spec, principal)))


def spec_view(spec: Spec, principal: Principal) -> dict[str, Any]:
    """The spec as its owner wrote it: snapshots have the names that the tenant has for them."""
    found: dict[str, Any] = msgspec.to_builtins(spec)
    if spec.snapshot is not None:
        found["snapshot"] = shown_snapshot(principal.tenant, spec.snapshot) or spec.snapshot
    return found


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T")
Item = TypeVar("Item", bound=HasId)


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Part of a list."""

    items: list[T]
    next: str | None = None
    """What to give as `after` for the next page; null at the end."""


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of a list."""

    after: str = ""
    """The `next` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


def page_of(items: Sequence[Item], query: PageQuery) -> Page[Item]:
    """The part of a list that is asked for; its items never change places. Raises InvalidSpec if the last item of the
    page before is gone."""
    begin, limit = 0, query.limit
    if query.after:
        places = [place for place, item in enumerate(items) if item.id == query.after]
        if not places:
            raise InvalidSpec("after: that page is gone; begin again without it", field="after")
        begin = places[0] + 1
    page = list(items[begin : begin + limit])
    return Page(page, page[-1].id if begin + limit < len(items) else None)
