"""What a sandbox costs that nobody uses."""

from __future__ import annotations

import asyncio

from skerry import providers
from skerry.measure.figures import Figure, p50
from skerry.measure.memory import private_memory, processes_of
from skerry.model.spec import Spec
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings
from .witness import warm_up


async def box_memory(settings: Settings) -> list[Figure]:
    provider = providers.load("local")
    await warm_up(provider)
    sandboxes = [await AsyncSandbox.create(Spec(), provider) for _ in range(settings.rounds(16))]
    try:
        await asyncio.gather(*(sandbox.ping() for sandbox in sandboxes))
        members = [processes_of(sandbox.id) for sandbox in sandboxes]
        totals = [sum(map(private_memory, pids)) / 1e6 for pids in members]
    finally:
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
        await provider.aclose()
    measured = f"{p50(totals):.2f} MB in {p50([len(pids) for pids in members]):.0f} processes"
    what = "private memory of an idle sandbox"
    return [Figure(case="memory", what=what, measured=measured, value=p50(totals), unit=" MB", at_most=1.2)]
