"""`python bench/install_peers.py`: the libraries that we are measured beside, each in an environment of its own."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parent / ".venv"

PACKAGES = {
    "docker-py": ["docker==7.2.0"],
    "aiodocker": ["aiodocker==0.27.0"],
    "testcontainers": ["testcontainers==4.15.0"],
    "SWE-ReX": ["swe-rex==1.4.0", "aiohttp==3.14.5"],  # which it imports and does not name
    "llm-sandbox": ["llm-sandbox[docker]==0.3.46"],
}
SERVERS = {"OpenSandbox": ["opensandbox-server==1.1.1"]}
"""Those that are measured beside `skerry serve`."""
CLIENTS = {"E2B": ["e2b==2.63.0"]}
"""Those that use our server."""


def python_of(peer: str) -> Path:
    return ENVIRONMENTS / peer / "bin" / "python"


def main() -> None:
    for peer, packages in (PACKAGES | SERVERS | CLIENTS).items():
        if not python_of(peer).exists():
            venv.create(ENVIRONMENTS / peer, with_pip=True)
        subprocess.run([python_of(peer), "-m", "pip", "install", "--quiet", *packages], check=True)


if __name__ == "__main__":
    main()
