"""Which tests share a worker, where there are several: those of one engine, and otherwise those of one file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

_ENGINES = {
    "docker_daemon": "docker",
    "fragile_daemon": "docker",  # two dockerds share docker0, and the addresses on it
    "podman_daemon": "podman",
    "incus_daemon": "incus",
    "incus_cluster": "incus",
}
_FIRST = (
    *("docker", "incus", "podman", "tests/providers/qemu", "tests/providers/firecracker", "tests/vm", "tests/docs"),
    *("tests/manager/test_model", "tests/manager/test_kill", "tests/cli", "tests/store"),
)
"""How the groups begin that take longest, so that no worker is alone with one at the end."""
_FILE = pytest.StashKey[str]()
"""Where a worker writes the group of each test for the one that hands them out: it collects none itself."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests with this name share a worker, as they share a thing")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    if _FILE not in stash:
        handle, stash[_FILE] = tempfile.mkstemp(prefix="skerry-groups-")
        os.close(handle)
    node.workerinput["groups"] = stash[_FILE]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        groups = {item.nodeid: group_of(item) for item in items}
        items.sort(key=lambda item: _rank(groups[item.nodeid]))
        if worker["workerid"] == "gw0":
            Path(worker["groups"]).write_text(json.dumps(groups))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def schedule(self) -> None:
            self._groups = json.loads(Path(config.stash[_FILE]).read_text())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            group: str = self._groups[nodeid]
            return group

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FILE in config.stash:
        Path(config.stash[_FILE]).unlink(missing_ok=True)


def group_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0])
    wanted = [_ENGINES[name] for name in getattr(item, "fixturenames", ()) if name in _ENGINES]
    callspec = getattr(item, "callspec", None)
    named = [value for value in callspec.params.values() if value in _ENGINES.values()] if callspec else []
    return next(iter([*wanted, *named]), item.nodeid.partition("::")[0])


def _rank(group: str) -> int:
    return next((rank for rank, name in enumerate(_FIRST) if group.startswith(name)), len(_FIRST))
