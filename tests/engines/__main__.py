"""python -m tests.engines up ENGINE [IMAGE ...]: an engine until SIGTERM or Ctrl-C; its address is printed."""

from __future__ import annotations

import argparse
import signal

from .daemons import running
from .images import load
from .incusd import running_incus


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    parser.add_argument("what", choices=["up"])
    parser.add_argument("engine", choices=["docker", "podman", "incus"])
    parser.add_argument(
        "images", nargs="*", help="of busybox, debian, distroless; busybox if none is named; Incus has it always"
    )
    chosen = parser.parse_args()
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    try:
        with running_incus() if chosen.engine == "incus" else running(chosen.engine) as daemon:
            for name in (chosen.images or ["busybox"]) if chosen.engine != "incus" else []:
                load(daemon.address, name)
            print(daemon.address, flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
