"""`python bench/run.py`: our figures beside the physical limit and the peers that are installed, in one run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import limit
from cases import CASES, Settings

from skerry.measure.figures import Figure, table

_BUSY = 0.5


async def measure(names: list[str], settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", end="", file=sys.stderr, flush=True)
        start = time.monotonic()
        figures += await CASES[name](settings)
        print(f" {time.monotonic() - start:.1f} s", file=sys.stderr)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(CASES), help="measure this case alone (repeatable)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rougher, in a few seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1):
        print("bench: this machine is busy with other work; read the figures as rough", file=sys.stderr)
    try:
        figures = asyncio.run(measure(options.only or list(CASES), Settings(quick=options.quick)))
    finally:
        limit.clean_up()
    if options.json:
        cpus, load = os.cpu_count(), os.getloadavg()[0]
        host = {"python": sys.version.split()[0], "kernel": os.uname().release, "cpus": cpus, "load": load}
        rows = [{**msgspec.to_builtins(each), "verdict": each.verdict} for each in figures]
        print(msgspec.json.format(msgspec.json.encode({"host": host, "figures": rows})).decode())
    else:
        print(table(figures))
    return 1 if any(each.verdict in ("over", "under") for each in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
