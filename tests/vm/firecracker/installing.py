"""Puts the stand-ins for Firecracker and its jailer into a folder, where any user may run them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from skerry.agent.bundle import GUEST

HERE = Path(__file__).parent
_PARTS = ("fake.py", "fake_vm.py", "fake_bodies.py", "fake_guest.py", "fake_jailer.py", "swagger.py")
_SYSTEM_PYTHON = "/usr/bin/python3"


@functools.cache
def api_description() -> dict[str, Any]:
    document = YAML(typ="safe").load(HERE / "api.yaml")
    assert isinstance(document, dict)
    return document


class StandIns:
    """`firecracker` and `jailer` in a folder, and what they found wrong with what they were asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.firecracker = folder / "firecracker"
        self.jailer = folder / "jailer"

    def be(self, version: str) -> None:
        """Be another version: before the first of its processes, as what a program is called is remembered."""
        self._set_faults({"version": version})

    def have_cgroups_in(self, root: Path) -> None:
        """Take that for the root of the second version of control groups."""
        self._set_faults({"cgroup_root": str(root)})

    def die_at(self, request: str) -> None:
        self._set_faults({"die_at": request})

    def without_kvm(self) -> None:
        self._set_faults({"kvm": False})

    def shut_down_in(self, seconds: float) -> None:
        """Have guests take so long to write out what they hold."""
        self._set_faults({"shuts_down_s": seconds})

    def refuse_restores(self) -> None:
        self._set_faults({"restores": False})

    def requests(self) -> list[str]:
        """All that was asked of any process, in order."""
        return (self._folder / "requests").read_text().splitlines()

    def jailed(self) -> list[list[str]]:
        """The arguments of the jailer, each time."""
        return [json.loads(line) for line in (self._folder / "jailed").read_text().splitlines()]

    def heal(self) -> None:
        (self._folder / "faults.json").unlink()

    def _set_faults(self, faults: dict[str, Any]) -> None:
        path = self._folder / "faults.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **faults}))

    @property
    def violations(self) -> list[str]:
        """Requests that Firecracker's description of its API does not allow."""
        return (self._folder / "violations").read_text().splitlines()


def install(folder: Path) -> StandIns:
    """The stand-ins run as uids that may not read where our own interpreter or sources are."""
    folder.mkdir(parents=True)
    for part in _PARTS:
        shutil.copyfile(HERE / part, folder / part)
    shutil.copytree(GUEST, folder / "guest", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "api.json").write_text(json.dumps(api_description()))
    (folder / "guests").mkdir()
    (folder / "guests").chmod(0o777)
    for name in ("violations", "requests", "jailed"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    python = _SYSTEM_PYTHON if os.access(_SYSTEM_PYTHON, os.X_OK) else sys.executable
    for name, module in (("firecracker", "fake"), ("jailer", "fake_jailer")):
        lines = [f"#!{python} -B", "import sys", f"sys.path.insert(0, {str(folder)!r})", f"from {module} import main"]
        (folder / name).write_text("\n".join([*lines, f"main({str(folder)!r})", ""]))
        (folder / name).chmod(0o755)
    return StandIns(folder)
