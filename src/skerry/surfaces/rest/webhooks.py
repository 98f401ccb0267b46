"""Webhooks: where events are posted to, and what came of that."""

from __future__ import annotations

from typing import Annotated

import msgspec

from skerry.model.tenants import Scope
from skerry.store.documents import Document
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.views import Page
from skerry.surfaces.server.post import Target
from skerry.surfaces.server.webhooks import Delivery, Hooks, HookState, Webhook, new_secret

routes = Routes("webhooks")
_Note = Annotated[str, msgspec.Meta(max_length=1000)]
_Kinds = Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]


class CreateWebhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where to post which events."""

    url: str
    """https:// or http://, of a host on the internet; other hosts are for the owner of this one alone."""
    events: _Kinds = ()
    """Kinds, such as `ready` or `destroyed`; none is all of them."""
    note: _Note = ""


class ChangeWebhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be another; what is left out stays."""

    url: str | None = None
    events: _Kinds | None = None
    note: _Note | None = None
    active: bool | None = None
    """Switched on again, it goes on with the event that it failed at."""


class WebhookView(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook. Its secret is told once, by the call that makes it."""

    id: str
    url: str
    events: tuple[str, ...]
    note: str
    active: bool
    project: str
    """The one whose events it gets; empty is all."""
    created_at: float
    created_by: str
    version: int
    after: int
    """The last event that was taken, or was none for it."""
    attempts: int
    """How often the event after that has failed so far."""
    failing_since: float | None
    off_because: str
    """Why it was switched off, if nobody asked for that."""

    @classmethod
    def of(cls, hook: Document[Webhook], state: HookState) -> WebhookView:
        return cls(
            id=hook.id,
            url=hook.body.url,
            events=hook.body.events,
            note=hook.body.note,
            active=hook.body.active,
            project=hook.project,
            created_at=hook.created_at,
            created_by=hook.body.created_by,
            version=hook.version,
            after=state.after,
            attempts=state.attempts,
            failing_since=state.failing_since,
            off_because=state.off_because,
        )


class CreatedWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook and its secret, which no other call tells."""

    webhook: WebhookView
    secret: str
    """`X-Skerry-Signature` is `t=TIME,v1=HEX`: HMAC-SHA256 of `TIME.BODY` with this."""


@routes.post("/webhooks", Scope.WEBHOOKS, status=201)
async def create(call: Call, body: CreateWebhook) -> CreatedWebhook:
    """Have events posted from now on: in order, each until it is taken with a 2xx, for a day at most."""
    trusted, secret = call.principal.is_admin, new_secret()
    _check(call, body.url, trusted=trusted)
    hook = Webhook(
        url=body.url,
        secret=secret,
        events=body.events,
        note=body.note,
        trusted=trusted,
        created_by=call.principal.actor,
    )
    hooks = _hooks(call)
    made = await hooks.add(hook)
    call.server.webhooks.look_again()
    return CreatedWebhook(webhook=await _shown(call, hooks, made), secret=secret)


@routes.get("/webhooks", Scope.WEBHOOKS)
async def list(call: Call) -> Page[WebhookView]:
    """List webhooks, and how each is."""
    return Page([WebhookView.of(hook, state) for hook, state in await _hooks(call).with_states()])


@routes.get("/webhooks/{id}", Scope.WEBHOOKS)
async def show(call: Call, id: str) -> WebhookView:
    """Show a webhook, and how it is."""
    hooks = _hooks(call)
    return await _shown(call, hooks, await hooks.hooks.get(id))


@routes.patch("/webhooks/{id}", Scope.WEBHOOKS, headers=("If-Match",))
async def change(call: Call, id: str, body: ChangeWebhook) -> WebhookView:
    """Change a webhook. An event that it fails at is tried again at once."""
    hooks = _hooks(call)
    changes = {name: value for name in body.__struct_fields__ if (value := getattr(body, name)) is not None}
    if body.url is not None:  # where it leads is trusted as whoever says so now is
        changes["trusted"] = call.principal.is_admin
        _check(call, body.url, trusted=call.principal.is_admin)
    with call.matching():
        changed = await hooks.change(id, call.match(), **changes)
    call.server.webhooks.look_again()
    return await _shown(call, hooks, changed)


@routes.post("/webhooks/{id}/secret", Scope.WEBHOOKS)
async def rotate(call: Call, id: str) -> CreatedWebhook:
    """Give a webhook another secret, which is used from now on."""
    hooks, secret = _hooks(call), new_secret()
    changed = await hooks.change(id, None, secret=secret)
    call.server.webhooks.look_again()
    return CreatedWebhook(webhook=await _shown(call, hooks, changed), secret=secret)


@routes.post("/webhooks/{id}/ping", Scope.WEBHOOKS)
async def ping(call: Call, id: str) -> Delivery:
    """Post a sign of life to a webhook now, and tell what came of it."""
    return await call.server.webhooks.ping(await _hooks(call).hooks.get(id))


@routes.get("/webhooks/{id}/deliveries", Scope.WEBHOOKS)
async def deliveries(call: Call, id: str) -> Page[Delivery]:
    """List the last attempts to post to a webhook, the newest first."""
    hooks = _hooks(call)
    await hooks.hooks.get(id)
    return Page([*reversed((await hooks.state(id)).log)])


@routes.delete("/webhooks/{id}", Scope.WEBHOOKS)
async def remove(call: Call, id: str) -> None:
    """Remove a webhook. What was not yet posted never is."""
    await _hooks(call).remove(id)
    call.server.webhooks.look_again()


def _hooks(call: Call) -> Hooks:
    return Hooks(call.manager.store)


def _check(call: Call, url: str, *, trusted: bool) -> None:
    call.server.poster.check(Target.parse(url), trusted=trusted)


async def _shown(call: Call, hooks: Hooks, hook: Document[Webhook]) -> WebhookView:
    call.tag(hook.version)
    return WebhookView.of(hook, await hooks.state(hook.id))
