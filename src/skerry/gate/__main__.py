"""`python -m skerry.gate STATE_DIR`: the gate of an installation, started by whoever needs it. Its task is JSON on
stdin."""

from __future__ import annotations

from skerry.host import background

if __name__ == "__main__":
    task = background.detach()
    from skerry.gate.process import run

    run(task)
