"""What Incus boxes are made of: users, networks, disks, limits that are reached, and what a stop leaves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from engines.images import make_debian
from engines.incusd import Incusd, free_subnet
from providers import packages, scores
from providers.making import Make

from skerry.errors import (
    AgentUnreachable,
    ConfigError,
    LimitReached,
    ProviderUnavailable,
    Unsupported,
    UserNotFound,
)
from skerry.model.spec import Spec
from skerry.providers.base import BoxState
from skerry.providers.incus import Incus
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import eventually

_SYS_ADMIN = 1 << 21


async def test_a_daemon_elsewhere_is_reached_through_its_own_exec(
    make: Make, incus: Incus, incus_daemon: Incusd, elsewhere: None
) -> None:
    sandbox = await make(env={"SECRET": "s"})
    assert (await sandbox.exec('echo "$SECRET"; echo x > ~/f')).text == "s\n"
    data = bytes(range(256)) * 20_000
    await sandbox.files.write("blob", data)
    assert await sandbox.files.read("blob") == data
    await sandbox.close()
    assert (await sandbox.exec("cat ~/f")).text == "x\n"
    devices = incus_daemon.ask("GET", f"/1.0/instances/skerry-{sandbox.id}")["devices"]
    assert devices["agent"]["source"].startswith("skerry-runtime-")
    await incus.stop(sandbox.id)
    with pytest.raises(AgentUnreachable, match="start it"):
        await incus.dial(sandbox.id)
    await incus.start(sandbox.id, sandbox.spec)
    assert (await sandbox.exec("cat ~/f")).text == "x\n"
    await incus.pause(sandbox.id)
    for dial in (incus.dial(sandbox.id), incus.dial_as(sandbox.id, "root")):
        with pytest.raises(AgentUnreachable, match="paused"):
            await dial


async def test_who_runs_in_a_box(make: Make) -> None:
    for asked, told in (("app", "1000 1000"), ("4242:77", "4242 77"), ("root", "0 0"), (None, "65532 65532")):
        sandbox = await make(**({"user": asked} if asked else {}))
        found = await sandbox.exec("echo $(id -u) $(id -g); touch ~/f && stat -c %u:%g ~")
        assert found.text.split("\n")[:2] == [told, told.replace(" ", ":")]
        await sandbox.destroy()
    with pytest.raises(UserNotFound, match="no user is called 'nobody-here'"):
        await make(user="nobody-here")
    with pytest.raises(UserNotFound, match="from 0 to 65535"):
        await make(user="100000")


async def test_root_of_a_box_has_few_capabilities_and_no_way_to_more(make: Make) -> None:
    sandbox = await make(user="root")
    status = (await sandbox.exec("grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status")).text.split()
    assert status[3::2] == ["1", "2"]
    assert not int(status[1], 16) & _SYS_ADMIN
    for attempt in ("mount -t tmpfs none /mnt", "unshare -U true", "chroot / true", "mknod /dev/sda b 8 0"):
        assert not (await sandbox.exec(attempt)).ok, attempt
    assert (await sandbox.exec("chown 7:7 /etc/passwd && echo x > /usr-is-mine")).ok


async def test_another_user_is_reached_by_name_and_by_number(make: Make, incus: Incus) -> None:
    sandbox = await make()
    for user, told in (("app", "1000"), ("root", "0"), ("77:78", "77")):
        assert (await sandbox.exec(["id", "-u"], user=user)).text.strip() == told
    for user in ("nobody-here", "77:abc", "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(UserNotFound, match="no user is called"):
            await sandbox.exec(["id"], user=user)
    for user in ("65536", "77:99999"):
        with pytest.raises(UserNotFound, match="from 0 to 65535"):
            await sandbox.exec(["id"], user=user)


async def test_boxes_on_a_bridge_reach_the_gateway_and_not_each_other(make: Make, incus_daemon: Incusd) -> None:
    first, second = await asyncio.gather(make(network="bridge"), make(network="bridge"))
    gateway = incus_daemon.ask("GET", f"/1.0/networks/{incus_daemon.bridge}")["config"]["ipv4.address"].partition("/")[
        0
    ]
    show = "ip -4 -o addr show eth0 | tr -s ' ' | cut -d' ' -f4 | cut -d/ -f1"
    addresses = [(await box.exec(show)).text.strip() for box in (first, second)]
    assert len({*addresses, gateway}) == 3
    serving = await first.start(f"echo hello | nc -l -p 8000 -s {addresses[0]}", background=True)
    assert (await first.exec("cat /etc/resolv.conf")).text == f"nameserver {gateway}\n"
    assert (await first.exec(f"echo | nc -w 2 {gateway} 53")).ok
    assert not (await second.exec(f"nc -w 2 {addresses[0]} 8000 </dev/null")).stdout
    await serving.kill()


async def test_a_box_cannot_take_anothers_address(make: Make) -> None:
    first, second = await asyncio.gather(make(network="bridge", user="root"), make(network="bridge", user="root"))
    show = "ip -4 -o addr show eth0 | tr -s ' ' | cut -d' ' -f4"
    stolen = (await first.exec(show)).text.strip()
    gateway = (await second.exec("ip route | sed -n 's/default via \\([0-9.]*\\) .*/\\1/p'")).text.strip()
    assert (await second.exec(f"echo | nc -w 2 {gateway} 53")).ok
    assert (await second.exec(f"ip addr flush dev eth0; ip addr add {stolen} dev eth0")).ok
    assert not (await second.exec(f"echo | nc -w 2 {gateway} 53")).ok


async def test_a_network_without_addresses_left_says_so(make: Make, incus_daemon: Incusd, cache: Path) -> None:
    small = f"{incus_daemon.bridge}-s"
    config = {"ipv4.address": "10.63.63.1/30", "ipv4.nat": "false", "ipv6.address": "none"}
    incus_daemon.ask("POST", "/1.0/networks", {"name": small, "type": "bridge", "config": config})
    try:
        provider = Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache), network=small))
        sandbox = await make(provider, network="bridge")
        with pytest.raises(LimitReached, match="no address left"):
            await make(provider, network="bridge")
        await sandbox.destroy()
        await (await make(provider, network="bridge")).destroy()
    finally:
        incus_daemon.ask("DELETE", f"/1.0/networks/{small}")


async def test_a_box_that_ended_by_itself_is_dead_and_one_that_was_stopped_by_hand_is_not(
    make: Make, incus: Incus, incus_daemon: Incusd
) -> None:
    ending, stopped = await make(lifetime=0.5), await make()
    path = f"/1.0/instances/skerry-{stopped.id}/state"
    incus_daemon.ask("PUT", path, {"action": "stop", "force": True, "timeout": 10})

    async def is_dead() -> bool:
        return (await incus.discover())[ending.id].state is BoxState.DEAD

    await eventually(is_dead, "the box whose time is over is dead")
    assert (await incus.discover())[stopped.id].state is BoxState.STOPPED


async def test_boxes_outlive_a_daemon_that_is_killed(make: Make, incus: Incus, incus_daemon: Incusd) -> None:
    sandbox = await make()
    process = await sandbox.start(["sleep", "1000"], background=True)
    incus_daemon.kill()
    assert (await sandbox.exec(["echo", "alive"])).text == "alive\n"
    with pytest.raises(ProviderUnavailable):
        await incus.discover()
    incus_daemon.start()
    await sandbox.close()
    assert [each.process for each in await sandbox.processes.list() if each.running] == [process.number]
    assert (await incus.discover())[sandbox.id].state is BoxState.RUNNING


async def test_folders_of_the_host_are_seen_with_their_owners(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "f").write_text("from the host")
    sandbox = await make(mounts=[f"{folder}:/mnt/rw", f"{folder}:/mnt/ro:ro"], user="1000")
    assert (await sandbox.exec("cat /mnt/ro/f; echo x > /mnt/rw/mine; stat -c %u /mnt/rw/mine /mnt/rw/f")).text == (
        "from the host1000\n0\n"
    )
    assert (folder / "mine").stat().st_uid == 1000
    assert not (await sandbox.exec("echo x > /mnt/ro/mine")).ok


async def test_a_daemon_that_is_not_there_says_how_to_have_one(incus_image: str) -> None:
    provider = Incus(Incus.Config(host="unix:///nowhere/unix.socket"))
    with pytest.raises(ProviderUnavailable, match="apt-get install incus"):
        await provider.check()


async def test_wrong_settings_are_named(incus_daemon: Incusd, incus: Incus) -> None:
    for setting, value in (("pool", "no-pool"), ("project", "no-project")):
        fields: Any = {setting: value}
        with pytest.raises(ProviderUnavailable, match=value):
            await Incus(Incus.Config(host=incus_daemon.address, **fields)).check()
    provider = Incus(Incus.Config(host=incus_daemon.address, network="no-network"))
    with pytest.raises(ConfigError, match="99999"):
        Incus(Incus.Config(host="https://incus:99999", certificate="c", key="k"))
    with pytest.raises(Unsupported, match="no-network"):
        await AsyncSandbox.create(Spec.of(provider="incus", image="busybox", network="bridge", data=False), provider)


@pytest.mark.timeout(180)
async def test_an_admin_installs_a_package_and_is_nobody_on_the_host(make: Make, incus: Incus, tmp_path: Path) -> None:
    image = await incus.import_image(make_debian(), "debian", lambda _: None)
    try:
        sandbox = await make(image="debian", admin=True)
        assert "nobody on the host" in sandbox.enforced["admin"].by
        audit_write, net_admin, net_bind_service = 29, 12, 10  # of its own namespaces, as every root of a box has
        await packages.check_capabilities(sandbox, audit_write, net_admin, net_bind_service)
        await packages.check_root_can_install(sandbox, packages.make(tmp_path))
        assert (await sandbox.exec("cat /proc/self/uid_map")).text.split()[1] != "0"
        await sandbox.destroy()
    finally:
        await incus.remove_image(image.id)


async def test_scratch_folders_can_be_written_to(make: Make) -> None:
    await packages.check_scratch(await make())


async def test_boxes_are_the_first_to_be_killed_where_memory_runs_out(make: Make, incus: Incus) -> None:
    for options in ({}, {"admin": True}):
        sandbox = await make(**options)
        pid = await incus._dialer.pid(sandbox.id)
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        for user in (None, "root"):
            await scores.check_first_to_be_killed(sandbox, user)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may say which number the next process has")
async def test_an_agent_is_found_though_the_hosts_numbers_of_processes_have_begun_anew(make: Make) -> None:
    sandbox = await make()
    Path("/proc/sys/kernel/ns_last_pid").write_text("300")
    process = await sandbox.start(["sleep", "1000"], background=True)
    await sandbox.close()
    assert [each.process for each in await sandbox.processes.list() if each.running] == [process.number]


async def test_boxes_meet_on_a_network_by_its_name(make: Make, incus_daemon: Incusd) -> None:
    name = f"{incus_daemon.bridge}n"
    config = {"ipv4.address": str(free_subnet()), "ipv4.nat": "false", "ipv6.address": "none"}
    incus_daemon.ask("POST", "/1.0/networks", {"name": name, "type": "bridge", "config": config})
    try:
        one, other = [await make(network=name) for _ in range(2)]
        address = (await one.exec("ip -4 -o addr show eth0 | sed 's/.*inet //; s,/.*,,'")).text.strip()
        await one.start("nc -ll -p 7000 -e echo hello", background=True)
        assert (await other.exec(f"until nc -w 1 {address} 7000; do :; done", timeout_s=20)).text == "hello\n"
        with pytest.raises(Unsupported, match=f"no managed bridge none-such.*{name}"):
            await make(network="none-such")
        await one.destroy()
        await other.destroy()
    finally:
        incus_daemon.ask("DELETE", f"/1.0/networks/{name}")


async def test_a_person_finds_a_sandbox_by_its_name(make: Make, incus_daemon: Incusd) -> None:
    sandbox = await make(name="agent-workers-003")
    found = incus_daemon.ask("GET", f"/1.0/instances/skerry-{sandbox.id}")
    assert found["description"] == "agent-workers-003"
