"""From nothing to the first answered ping, and back."""

from __future__ import annotations

import time

import limit
from figure import Figure, ms, p50, ratio

from skerry import providers
from skerry.model.spec import Spec
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings


async def create(settings: Settings) -> list[Figure]:
    provider = providers.load("local")
    ours, ends, bare = [], [], []
    with limit.bare_box() as box:
        for round in range(settings.rounds(80) + 2):
            bare.append(box.once())
            start = time.perf_counter()
            sandbox = await AsyncSandbox.create(Spec(), provider)
            try:
                await sandbox.ping()
                pinged = time.perf_counter()
            finally:
                await sandbox.destroy()
            ours.append(pinged - start)
            ends.append(time.perf_counter() - pinged)
            if round == 1:  # the first rounds find out about the host
                ours, ends, bare = [], [], []
    await provider.aclose()
    end = Figure(case="create", what="destroy", measured=ms(p50(ends)), value=p50(ends) * 1e3, unit=" ms")
    return [ratio("create", "create to first ping", ours, bare, against="bwrap true", at_most=3), end]
