"""`clients.py PROVIDER CONFIG ID COUNT`: one program of several that use one box, with so many handles at once."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from skerry import providers
from skerry.sandbox.sandbox import AsyncSandbox


async def use(provider: str, config: str, id: str, count: int) -> list[str]:
    """How the command of each handle ended."""
    made = providers.load(provider, msgspec.json.decode(config))

    async def one(number: int) -> str:
        sandbox = await AsyncSandbox.open(id, made)
        try:
            return (await sandbox.exec(["echo", str(number)])).text.strip()
        finally:
            await sandbox.close()

    try:
        return await asyncio.gather(*(one(number) for number in range(count)))
    finally:
        await made.aclose()


async def all_served(provider: str, config: dict[str, str], id: str, *, programs: int, handles: int) -> None:
    """Raises unless each of so many programs has each of its commands run."""
    argv = [sys.executable, __file__, provider, msgspec.json.encode(config).decode(), id, str(handles)]
    running = [
        await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        for _ in range(programs)
    ]
    for program in running:
        said, complaints = await program.communicate()
        assert program.returncode == 0, complaints.decode()[-2000:]
        assert said.split() == [b"%d" % number for number in range(handles)]


if __name__ == "__main__":
    print(*asyncio.run(use(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
