"""`plain FOLDER NETWORK FACTS...`: the catalogue in `local` boxes of whoever runs this, or where NETWORK is `rules` its
cases of the network; how each case ended, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from providers.local.forks import warm_up

from skerry.model.spec import Spec, SpecOptions
from skerry.providers.local import Local
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance import base

from .attempts import NETWORK, PYTHON, tried
from .boxes import with_rules


async def main(folder: str, network: str, *facts: str) -> None:
    provider = Local(Local.Config(state_dir=f"{folder}/state", cache_dir=f"{folder}/cache"))

    async def make(options: SpecOptions) -> AsyncSandbox:
        return await base.make(Spec.of(**options), provider)

    try:
        await warm_up(provider)  # the boxes that follow are forked; those of root are tried both ways
        if network == "rules":
            ends = await tried(with_rules(make), facts, PYTHON, limits_memory=False, classes=NETWORK)
        else:
            limits_memory = bool((await provider.enforcement(Spec()))["memory"].by)
            ends = await tried(make, facts, PYTHON, limits_memory)
        print(json.dumps(ends))
    finally:
        for id in await provider.discover():
            await provider.destroy(id)
        await provider.aclose()


asyncio.run(main(*sys.argv[1:]))
