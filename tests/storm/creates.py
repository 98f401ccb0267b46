"""python creates.py TASK: a process that has found out nothing yet makes boxes at once, tells of them, and ends them.

Of TASK, in JSON: the provider, its settings, the fields of the spec, how many boxes. It prints the id and `enforced` of
each box, and destroys them when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgspec

from skerry import providers
from skerry.model.spec import Spec
from skerry.sandbox.sandbox import AsyncSandbox


async def main(task: dict[str, Any]) -> None:
    provider = providers.load(task["provider"], task["settings"])
    spec = Spec.of(provider=task["provider"], **task.get("spec", {}))
    creating = (AsyncSandbox.create(spec, provider) for _ in range(task["count"]))
    made = await asyncio.gather(*creating, return_exceptions=True)
    boxes = [each for each in made if isinstance(each, AsyncSandbox)]
    told = [{"id": box.id, "enforced": msgspec.to_builtins(dict(box.enforced))} for box in boxes]
    print(json.dumps({"boxes": told, "failed": [repr(each) for each in made if isinstance(each, BaseException)]}))
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(box.destroy(volumes=True) for box in boxes))
    await provider.aclose()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
