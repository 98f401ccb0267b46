"""E2B's SDK of a version in an environment of its own, and its tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

VERSIONS = {"newest": "e2b", "2.45.1": "e2b==2.45.1"}
INTERPRETER = {"interpreter": "e2b-code-interpreter"}
_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
_LIVE = (
    "tests/{}/api_{}",
    "tests/{}/sandbox_{}",
    "tests/{}/template_{}/methods",
    "tests/{}/template_{}/test_background_build.py",
    "tests/{}/template_{}/test_build.py",
    "tests/{}/template_{}/test_exists.py",
    "tests/{}/template_{}/test_tags.py",
)
"""Where there are tests that speak with a server; all others are of the SDK alone."""
_LIVE_OF_INTERPRETER = ("tests",)
_ALL_S = 3600.0


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skerry-e2b"


class Suite:
    """The tests of one version."""

    def __init__(self, version: str, source: Path) -> None:
        self._folder = cache() / version
        self._requirement = {**VERSIONS, **INTERPRETER}[version]
        self.name = self._requirement.partition("==")[0]
        self._source = source
        both = [part.format(kind, kind) for kind in ("sync", "async") for part in _LIVE]
        self._live = _LIVE_OF_INTERPRETER if version in INTERPRETER else (*both, "tests/shared/git")

    @property
    def _python(self) -> Path:
        return self._folder / "bin/python"

    @property
    def installed(self) -> str:
        """The version that is there."""
        code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        asked = [self._python, "-c", code, self.name]
        return subprocess.run(asked, capture_output=True, check=True, text=True).stdout.strip()

    def install(self) -> None:
        """Have the SDK, if it is not there."""
        if not self._python.exists():
            venv.create(self._folder, with_pip=True)
        packages = [self._requirement, *_TOOLS]
        subprocess.run([self._python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=_ALL_S)

    def control(self, port: int) -> set[str]:
        """Names of the tests that pass although nobody listens; kept, since that is so until there is another SDK."""
        kept = self._folder / f"control-{self.installed}.json"
        if not kept.exists():
            url = f"http://127.0.0.1:{port}"
            variables = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": f"e2b_{'0' * 40}"}
            results = self.run(variables, ())
            kept.write_text(json.dumps(sorted(name for name, passed in results.items() if passed)))
        return set(json.loads(kept.read_text()))

    def run(self, variables: Mapping[str, str], chosen: Sequence[str], inside: Sequence[str] = ()) -> dict[str, bool]:
        """Run them; whether each passed, by its name. Those that were skipped are not there."""
        with tempfile.TemporaryDirectory(prefix="skerry-e2b-") as text:
            folder = Path(text)
            shutil.copytree(self._source / "tests", folder / "tests")
            shutil.copy(self._source / "pytest.ini", folder)
            report = folder / "report.xml"
            command = [
                *inside, str(self._python), "-m", "pytest", "-q", "-n", "4", "--timeout", "120", "--tb", "short",
                "--junit-xml", str(report), "-p", "no:cacheprovider", *(chosen or self._live),
            ]  # fmt: skip
            plain = {
                name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "E2B" not in name
            }
            subprocess.run(command, cwd=folder, env={**plain, **variables}, check=False, timeout=_ALL_S)
            return _read(report)


def _read(report: Path) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("skipped") is None:
            found[name] = case.find("failure") is None and case.find("error") is None and found.get(name, True)
    return found
