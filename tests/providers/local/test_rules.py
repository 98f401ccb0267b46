"""Boxes of `local` that are prepared for rules: whatever their root has, and whoever makes them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from skerry.errors import CreateFailed, Unsupported
from skerry.manager.create import create_or_nothing
from skerry.model.spec import Network, Spec, new_id
from skerry.providers.local import Local
from skerry.providers.local.host import Host
from skerry.providers.shared import loopback
from skerry.testing.conformance.base import make

NEEDS_BUSYBOX = pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed")
OUR_PYTHON: str = sys._base_executable  # type: ignore[attr-defined]
OTHER = "nameserver 203.0.113.53\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With nothing but busybox: the agent brings a copy of an interpreter. Ours may lie where only root may look, and
    the tests run as somebody else."""
    interpreter = next((path for path in (OUR_PYTHON, "/usr/bin/python3") if os.access(path, os.X_OK)), None)
    if interpreter is None:
        pytest.skip(f"this user may not read {OUR_PYTHON}, and there is no /usr/bin/python3 to copy instead")
    monkeypatch.setattr(sys, "_base_executable", interpreter)
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    return root


async def said_in(local: Local, command: list[str] | str, spec: Spec) -> str:
    sandbox = await make(spec, local)
    try:
        return (await sandbox.exec(command)).text
    finally:
        await sandbox.destroy()


@NEEDS_BUSYBOX
async def test_the_resolver_of_a_root_folder_is_covered_by_ours(local: Local, root: Path) -> None:
    (root / "etc/resolv.conf").write_text(OTHER)
    spec = Spec(root=str(root), network=Network.RULES)
    assert await said_in(local, "busybox cat /etc/resolv.conf", spec) == loopback.RESOLV_CONF_TEXT
    assert (root / "etc/resolv.conf").read_text() == OTHER


@NEEDS_BUSYBOX
@pytest.mark.parametrize("leads", [None, "/run/systemd/resolve/stub-resolv.conf"])
async def test_a_root_folder_without_a_resolver_is_taken_as_it_is(local: Local, root: Path, leads: str | None) -> None:
    if leads is not None:
        (root / "etc/resolv.conf").symlink_to(leads)
    spec = Spec(root=str(root), network=Network.RULES)
    assert await said_in(local, "busybox cat /etc/resolv.conf || echo none", spec) == "none\n"


@NEEDS_BUSYBOX
async def test_a_link_to_another_resolver_is_refused_and_leaves_nothing(local: Local, root: Path) -> None:
    (root / "other.conf").write_text(OTHER)
    (root / "etc/resolv.conf").symlink_to("/other.conf")
    with pytest.raises(CreateFailed, match="make it a file"):
        await make(Spec(root=str(root), network=Network.RULES), local)
    assert await local.discover() == {}


async def test_a_box_whose_ports_stay_closed_is_no_box(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: Host, pid: int, uid: int | None, log_fd: int) -> int:
        argv = ["/bin/sh", "-c", "echo no such luck >&2; exit 1"]
        return os.posix_spawn(argv[0], argv, {}, file_actions=[(os.POSIX_SPAWN_DUP2, log_fd, 2)])

    monkeypatch.setattr(local, "_zygotes", None)  # a fork opens them itself
    monkeypatch.setattr(Host, "open_low_ports", fail)
    with pytest.raises(CreateFailed, match="ip_unprivileged_port_start") as raised:
        await create_or_nothing(local, new_id(), Spec(network=Network.RULES))
    assert "no such luck" in raised.value.log
    assert await local.discover() == {}


async def test_a_host_that_cannot_prepare_boxes_refuses_rules_before_anything_exists(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "why_no_rules", lambda host: "/proc/sys is read-only here")
    with pytest.raises(Unsupported, match="read-only here"):
        await make(Spec(network=Network.RULES), local)
    assert (await local.describe())["rules"].why_not == "/proc/sys is read-only here"
    await said_in(local, ["true"], Spec())


async def test_without_uids_of_their_own_boxes_are_prepared_too(local: Local) -> None:
    local._host.__dict__["has_own_uids"] = False
    said = await said_in(local, ["cat", loopback.LOW_PORTS_FILE, loopback.RESOLV_CONF], Spec(network=Network.RULES))
    assert said == f"0\n{loopback.RESOLV_CONF_TEXT}"


async def test_a_box_without_rules_and_the_host_keep_their_low_ports(local: Local) -> None:
    before = Path(loopback.LOW_PORTS_FILE).read_text()
    other = await make(Spec(), local)
    try:
        assert await said_in(local, ["cat", loopback.LOW_PORTS_FILE], Spec(network=Network.RULES)) == "0\n"
        assert (await other.exec(["cat", loopback.LOW_PORTS_FILE])).text == "1024\n"
    finally:
        await other.destroy()
    assert Path(loopback.LOW_PORTS_FILE).read_text() == before


async def test_doctor_tells_that_rules_can_be_had(local: Local) -> None:
    assert (await local.describe())["rules"].by == loopback.BY_RULES


@pytest.mark.skipif(not os.path.exists("/usr/bin/node"), reason="Node is not installed in /usr")
async def test_a_resolver_that_is_no_c_librarys_asks_the_same_server(local: Local) -> None:
    code = """
const server = require("dgram").createSocket("udp4");
server.on("message", (query, who) => {
  const answer = Buffer.from(query);
  answer[2] = 0x81; answer[3] = 0x83;
  server.send(answer, who.port, who.address);
});
server.bind(53, "127.0.0.1", () => {
  const dns = require("dns");
  dns.resolve4("name.of.a.test", (error) => { console.log(dns.getServers().join(), error.code); process.exit(); });
});
"""
    assert await said_in(local, ["node", "-e", code], Spec(network=Network.RULES)) == "127.0.0.1 ENOTFOUND\n"
