"""Rules of sandboxes through the manager: refused in time, changed live, and kept over all that happens to a box."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from gate.own_gate import config_with_gate, end_gates, fetch, gates, hold, web

from skerry import Sandbox, SandboxManager
from skerry.config import Config, NetworkConfig
from skerry.errors import ConfigError, InvalidSpec, NotFound, Unsupported, WrongState
from skerry.gate.client import GateClient
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.secrets import Secret
from skerry.model.spec import Network, SandboxId, Spec
from skerry.pool.claim import claim
from skerry.pool.pool import AsyncSandboxPool
from skerry.providers.base import Enforcement
from skerry.providers.local.provider import Local
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox

from .world import ENDED


@pytest.fixture
def config(folder: Path) -> Iterator[Config]:
    """An installation of its own; its gate is ended after the test."""
    yield config_with_gate(folder)
    end_gates(folder)


@pytest.fixture
async def rules(config: Config) -> AsyncIterator[AsyncSandboxManager]:
    """A manager on real boxes."""
    async with AsyncSandboxManager(config) as manager:
        yield manager
        await manager.destroy_all()


# what is refused before there is anything


async def test_what_only_this_program_has_can_have_no_rules(manager: AsyncSandboxManager) -> None:
    with pytest.raises(Unsupported, match="object of this program"):
        await manager.create(allow=["pypi.org"])
    with pytest.raises(Unsupported, match="object of this program"):
        await AsyncSandbox.create(Spec(provider="mock", network=Network.RULES), Mock())
    assert await manager.list(ENDED) == []


async def test_a_set_or_fleet_that_there_is_not_is_refused_before_anything_is_made(rules: AsyncSandboxManager) -> None:
    with pytest.raises(InvalidSpec, match="no set is called so"):
        await rules.create(allow=["pyhton"])
    with pytest.raises(InvalidSpec, match="only members of a fleet"):
        await rules.create(reach=["db:5432"])
    assert await rules.list(ENDED) == []


async def test_a_secret_that_cannot_be_had_is_refused_before_anything_is_made(
    rules: AsyncSandboxManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(InvalidSpec, match="the variable TOKEN is not set"):
        await rules.create(secrets={"TOKEN": Secret(hosts=("api.test",))})
    monkeypatch.setenv("TOKEN", "hunter2hunter2")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cryptography", None)  # it is not installed
        with pytest.raises(ConfigError, match=r"pip install 'skerry\[network\]'"):
            await rules.create(secrets={"TOKEN": Secret(hosts=("api.test",))})
    with pytest.raises(InvalidSpec, match="no file /nowhere/token"):
        await rules.create(secrets={"TOKEN": Secret(hosts=("api.test",), file="/nowhere/token")})
    assert await rules.list(ENDED) == []


async def test_a_box_that_was_made_without_rules_cannot_be_given_any(rules: AsyncSandboxManager) -> None:
    sandbox = await rules.create()
    for change in (sandbox.network.allow("pypi.org"), sandbox.network.set(deny=["pypi.org"])):
        with pytest.raises(WrongState, match="make one with network='rules'"):
            await change
    with pytest.raises(WrongState):
        async with sandbox.network.open_to("pypi.org"):
            pass
    assert (await sandbox.network.show()).network == "none"


async def test_sandboxes_without_rules_start_no_gate(rules: AsyncSandboxManager, folder: Path) -> None:
    await rules.create()
    await rules.reconcile()
    assert gates(folder) == []
    assert not (folder / "gate").exists()


# live changes


async def test_a_rule_holds_for_the_next_connection_and_ends_the_open_ones_that_it_forbids(
    rules: AsyncSandboxManager,
) -> None:
    async with web() as port:
        url = f"http://web.test:{port}/"
        sandbox = await rules.create(network="rules")
        assert "error" in await fetch(sandbox, url)
        await sandbox.network.allow(f"WEB.test:{port}", f"other.test:{port}")
        assert await fetch(sandbox, url) == "hello"
        async with hold(sandbox, "web.test", port) as forbidden, hold(sandbox, "other.test", port) as allowed:
            told = await sandbox.network.deny(f"web.test:{port}")
            assert (told.allow, told.deny) == ((f"other.test:{port}",), (f"web.test:{port}",))
            assert await forbidden.says() == "ended"
            assert "error" in await fetch(sandbox, url)
            assert await fetch(sandbox, f"http://other.test:{port}/") == "hello"
            await sandbox.network.set(allow=[], deny=[])
            assert await allowed.says() == "ended"
        assert sandbox.spec.allow == ()


async def test_rules_that_change_while_a_box_is_made_hold_when_it_is_there(
    rules: AsyncSandboxManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rules.create(network="rules")  # a gate that has just begun reads the whole registry
    make = Local.create

    async def create(self: Local, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        """Somebody changes the registry meanwhile, and dies before the gate is told."""
        record = await rules.store.get(id)
        await rules.store.change(record, spec=msgspec.structs.replace(record.spec, allow=()), kind="rules")
        return await make(self, id, spec)

    monkeypatch.setattr(Local, "create", create)
    async with web() as port:
        sandbox = await rules.create(allow=[f"web.test:{port}"])
        assert "error" in await fetch(sandbox, f"http://web.test:{port}/")


async def test_a_change_is_an_event_and_any_program_sees_it(rules: AsyncSandboxManager, config: Config) -> None:
    sandbox = await rules.create(allow=["python"], name="it")
    await sandbox.network.deny("upload.pypi.org")
    await sandbox.network.deny("upload.pypi.org")  # nothing new, so no event
    assert [event.kind async for event in rules.events()].count("rules") == 1
    async with AsyncSandboxManager(config) as other:
        shown = await (await other.get("it")).network.show()
    assert (shown.network, shown.allow, shown.deny) == ("rules", ("python",), ("upload.pypi.org",))


async def test_what_is_no_rule_changes_nothing(rules: AsyncSandboxManager) -> None:
    sandbox = await rules.create(allow=["pypi.org"])
    for wrong in ("http://pypi.org/", "pypi.org:0", "no-such-set", "10.0.0.1/8"):
        with pytest.raises(InvalidSpec):
            await sandbox.network.allow(wrong)
    with pytest.raises(InvalidSpec, match="give a list"):
        await sandbox.network.set(allow="pypi.org")
    assert (await sandbox.network.show()).allow == ("pypi.org",)


async def test_a_host_is_open_for_as_long_as_the_block_lasts(rules: AsyncSandboxManager) -> None:
    async with web() as port:
        url, rule = f"http://web.test:{port}/", f"web.test:{port}"
        sandbox = await rules.create(deny=[rule], allow=["pypi.org"])
        async with sandbox.network.open_to(rule, "pypi.org"):
            assert await fetch(sandbox, url) == "hello"
            await sandbox.network.allow("example.org")  # what others change meanwhile stays
        assert "error" in await fetch(sandbox, url)
        shown = await sandbox.network.show()
        assert (shown.allow, shown.deny) == (("pypi.org", "example.org"), (rule,))


async def test_a_block_that_fails_or_is_cancelled_closes_what_it_opened(rules: AsyncSandboxManager) -> None:
    sandbox = await rules.create(network="rules")
    with pytest.raises(ZeroDivisionError):
        async with sandbox.network.open_to("pypi.org"):
            raise ZeroDivisionError
    assert (await sandbox.network.show()).allow == ()
    is_open = asyncio.Event()

    async def work() -> None:
        async with sandbox.network.open_to("pypi.org"):
            is_open.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await is_open.wait()
    assert (await sandbox.network.show()).allow == ("pypi.org",)
    task.cancel()
    await asyncio.wait([task])
    assert (await sandbox.network.show()).allow == ()


async def test_a_block_whose_sandbox_ends_is_quiet(rules: AsyncSandboxManager) -> None:
    sandbox = await rules.create(network="rules")
    async with sandbox.network.open_to("pypi.org"):
        await sandbox.destroy()
    with pytest.raises(NotFound):
        await sandbox.network.allow("pypi.org")


def test_the_synchronous_interface_has_the_same(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxManager(config) as manager:
        sandbox: Sandbox = manager.create(network="rules")
        with sandbox.network.open_to("pypi.org"):
            assert sandbox.network.show().allow == ("pypi.org",)
        assert sandbox.network.set(allow=["python"]).allow == ("python",)
        sandbox.destroy()


# what a box is told


async def test_a_box_is_told_of_its_proxy_and_the_registry_keeps_its_env_as_it_was(rules: AsyncSandboxManager) -> None:
    sandbox = await rules.create(network="rules", env={"NO_PROXY": "mine"})
    told = (await sandbox.exec("echo $http_proxy $HTTPS_PROXY $no_proxy $NO_PROXY")).stdout.decode().split()
    assert told == ["http://127.200.0.1:3128", "http://127.200.0.1:3128", "localhost,127.0.0.1,::1", "mine"]
    assert (await rules.record(sandbox.id)).spec.env == {"NO_PROXY": "***"}
    none = await rules.create()
    assert (await none.exec("echo $http_proxy")).stdout == b"\n"


async def test_a_command_begins_when_the_network_is_up(rules: AsyncSandboxManager) -> None:
    async with web() as port:
        code = f"import urllib.request; print(urllib.request.urlopen('http://web.test:{port}/').read().decode())"
        sandbox = await rules.create(command=["python3", "-c", code], restart="no", allow=[f"web.test:{port}"])
        output = b"".join([data async for _, data in sandbox.service.logs(follow=True)])
        assert output == b"hello\n"


# what happens to boxes


async def test_settings_of_hosts_that_have_changed_hold_when_the_next_program_makes_a_sandbox(
    rules: AsyncSandboxManager, config: Config, folder: Path
) -> None:
    async with web() as port:
        sandbox = await rules.create(allow=[f"new.test:{port}"])
        assert await fetch(sandbox, f"http://new.test:{port}/") != "hello"
        newer = config_with_gate(folder, network=NetworkConfig(hosts={"new.test": ("127.0.0.1",)}))
        async with AsyncSandboxManager(newer) as other:
            found = await other.create(allow=[f"new.test:{port}"])
            assert await fetch(found, f"http://new.test:{port}/") == "hello"


async def test_warm_sandboxes_reach_nothing_and_are_given_the_rules_of_their_claim(
    rules: AsyncSandboxManager, config: Config
) -> None:
    async with web() as port, AsyncSandboxPool(rules, network="rules", size=2) as pool:
        await pool.wait_for_full(30)
        assert all(record.spec.allow == () for record in await rules.list())
        sandbox = await pool.acquire(allow=[f"web.test:{port}"])
        assert await fetch(sandbox, f"http://web.test:{port}/") == "hello"
        async with AsyncSandboxManager(config) as other:
            claimed = await claim(other, Spec(provider="local", allow=(f"other.test:{port}",)))
            assert claimed is not None
            assert await fetch(claimed, f"http://other.test:{port}/") == "hello"
            assert "error" in await fetch(claimed, f"http://web.test:{port}/")
        assert pool.stats().hits == 1


async def test_a_pool_without_a_gate_refuses_rules(rules: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(rules, size=1) as pool:
        with pytest.raises(InvalidSpec, match="make the pool with network='rules'"):
            await pool.acquire(allow=["pypi.org"])


async def test_many_sandboxes_share_one_gate(rules: AsyncSandboxManager, config: Config, folder: Path) -> None:
    async with web() as port:
        made = await asyncio.gather(*(rules.create(allow=[f"web.test:{port}"]) for _ in range(100)))
        assert len(gates(folder)) == 1
        status = await GateClient(config).status()
        assert status is not None
        assert {box.id for box in status.boxes if box.up} == {sandbox.id for sandbox in made}
        assert {await fetch(sandbox, f"http://web.test:{port}/") for sandbox in made[::20]} == {"hello"}
