"""All calls of the API, noun by noun."""

from __future__ import annotations

from skerry.surfaces.rest import (
    agent_stream,
    events,
    execution,
    files,
    fleet_exec,
    fleets,
    history,
    images,
    interpreters,
    ledger,
    network,
    operations,
    pools,
    ports,
    processes,
    sandboxes,
    snapshots,
    system,
    tenants,
    terminals,
    tokens,
    volumes,
    webhooks,
)
from skerry.surfaces.rest.route import Route

NOUNS = (
    sandboxes,
    events,
    execution,
    interpreters,
    files,
    processes,
    terminals,
    agent_stream,
    network,
    ports,
    history,
    ledger,
    webhooks,
    tenants,
    tokens,
    system,
    snapshots,
    volumes,
    images,
    pools,
    fleets,
    fleet_exec,
    operations,
)
ALL: tuple[Route, ...] = tuple(route for noun in NOUNS for route in noun.routes.all)
