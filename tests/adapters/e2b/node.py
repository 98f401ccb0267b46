"""A smoke of E2B's newest package for Node."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.adapters.e2b.suite import cache

_SCRIPT = Path(__file__).with_name("smoke.mjs")
_INSTALL_S = 300.0
_RUN_S = 120.0


def smoke(variables: Mapping[str, str]) -> int:
    """Install the package in a folder of its own, and have it use a sandbox; the exit code."""
    folder = cache() / "node"
    folder.mkdir(parents=True, exist_ok=True)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "e2b@latest"]
    subprocess.run(install, cwd=folder, check=True, timeout=_INSTALL_S)
    script = folder / _SCRIPT.name
    shutil.copy(_SCRIPT, script)
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(["node", script], env={**plain, **variables}, timeout=_RUN_S, check=False).returncode
