"""A smoke of E2B's newest packages for Node."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.adapters.e2b.suite import cache

_SCRIPTS = [Path(__file__).with_name(name) for name in ("smoke.mjs", "smoke_interpreter.mjs")]
_PACKAGES = ("e2b@latest", "@e2b/code-interpreter@latest")
_INSTALL_S = 300.0
_RUN_S = 120.0


def smoke(variables: Mapping[str, str]) -> int:
    """Install the packages in a folder of their own, and have each use a sandbox; the first exit code that is not 0."""
    folder = cache() / "node"
    folder.mkdir(parents=True, exist_ok=True)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *_PACKAGES]
    subprocess.run(install, cwd=folder, check=True, timeout=_INSTALL_S)
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    for script in _SCRIPTS:
        copy = Path(shutil.copy(script, folder))
        code = subprocess.run(["node", copy], env={**plain, **variables}, timeout=_RUN_S, check=False).returncode
        if code:
            return code
    return 0
