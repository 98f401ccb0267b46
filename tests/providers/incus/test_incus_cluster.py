"""Boxes on a real cluster of three: spread over its members, lost while theirs is away, and found again."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engines.incus_world import PATIENCE_S, World
from engines.incusd import IMAGE

from skerry.errors import AgentError, NotFound, ProviderError, ProviderUnavailable, Unsupported
from skerry.manager.decide import Action
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId
from skerry.model.states import State

pytestmark = pytest.mark.timeout(180)


async def test_many_at_once_are_spread_evenly(world: World) -> None:
    async with world.manager(timeout_s=30) as manager:
        made = await asyncio.gather(*(manager.create(image=IMAGE, data=False) for _ in range(12)))
        places = world.places()
        assert places.keys() == {each.id for each in made}
        assert Counter(places.values()) == {"n1": 4, "n2": 4, "n3": 4}
        said = await asyncio.gather(*(each.exec(["hostname"]) for each in made))
        assert all(each.ok for each in said)
        await manager.destroy_all()
    assert world.places() == {}


async def test_a_box_is_where_it_was_wanted(world: World) -> None:
    cluster = world.cluster
    cluster.ask("POST", "/1.0/cluster/groups", {"name": "chosen", "members": ["n2"]})
    try:
        async with world.manager() as manager:
            on_third = await manager.create(image=IMAGE, target="n3")
            of_group = await manager.create(image=IMAGE, group="chosen")
            assert world.places() == {on_third.id: "n3", of_group.id: "n2"}
            with pytest.raises(NotFound, match="'n9'; it has n1, n2, n3"):
                await manager.create(image=IMAGE, target="n9")
            with pytest.raises(NotFound, match="'none-such'; there is chosen, default"):
                await manager.create(image=IMAGE, group="none-such")
            assert world.places().keys() == {on_third.id, of_group.id}
    finally:
        member = cluster.ask("GET", "/1.0/cluster/members/n2")
        wanted = {key: member[key] for key in ("config", "description", "roles", "failure_domain")}
        cluster.ask("PUT", "/1.0/cluster/members/n2", {**wanted, "groups": ["default"]})
        cluster.ask("DELETE", "/1.0/cluster/groups/chosen")


async def test_a_box_that_is_made_again_is_where_its_data_is(world: World) -> None:
    async with world.manager() as manager:
        first = await manager.create(image=IMAGE, name="kept", target="n2")
        await first.files.write("/.data/note", "n2 has it")
        await manager.destroy(first.id)
        with pytest.raises(Unsupported, match="its data is on member 'n2'"):
            await manager.create(image=IMAGE, name="kept", target="n3")
        again = await manager.create(image=IMAGE, name="kept")
        assert world.places() == {again.id: "n2"}
        assert await again.files.read("/.data/note") == b"n2 has it"


async def test_the_caches_of_a_project_are_on_every_member(world: World) -> None:
    async with world.manager() as manager:
        for member in ("n1", "n2", "n2"):
            sandbox = await manager.create(image=IMAGE, cache="write", target=member)
            assert (await sandbox.exec(["ls", "/.cache"])).ok


async def test_a_lost_member_is_no_end(world: World) -> None:
    async with world.manager() as manager:
        near = await manager.create(image=IMAGE, target="n1")
        far, unwanted = [await manager.create(image=IMAGE, target="n2") for _ in range(2)]
        await far.files.write("note", "still here")
        world.cluster.kill("n2")
        await until(manager, {near.id: State.READY, far.id: State.LOST, unwanted.id: State.LOST})
        assert (await manager.execute(near.id, ["true"])).ok
        made = await asyncio.gather(*(manager.create(image=IMAGE, network="bridge") for _ in range(4)))
        assert "n2" not in {world.places()[each.id] for each in made}
    async with world.manager() as other:  # a program that has no stream to it yet
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises((ProviderUnavailable, AgentError)):
                await other.provider("incus").dial(far.id)
            with pytest.raises(ProviderError):
                await other.destroy(unwanted.id)
        await world.seen("n2", online=False)
        with pytest.raises(ProviderUnavailable, match="incus cluster list"):
            await other.reconcile()  # it is still to be removed
        assert (await other.record(unwanted.id)).doomed
        await asyncio.to_thread(world.cluster.start, "n2")
        await world.seen("n2", online=True)
        await until(other, {near.id: State.READY, far.id: State.READY, unwanted.id: State.DESTROYED})
        assert await (await other.get(far.id)).files.read("note") == b"still here"
        assert world.places()[far.id] == "n2"
        assert unwanted.id not in world.places()


async def test_a_call_to_a_member_that_is_cut_off_ends(world: World) -> None:
    async with world.manager() as manager:
        near = await manager.create(image=IMAGE, target="n1")
        far = await manager.create(image=IMAGE, target="n2")
        assert (await far.exec(["true"])).ok
        world.cluster.cut_off("n2")
        made = await asyncio.gather(*(manager.create(image=IMAGE) for _ in range(3)))
        incus = manager.provider("incus")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "an open stream": lambda: far.exec(["true"], timeout_s=2),
            "dial": lambda: incus.dial(far.id),
            "stop": lambda: manager.stop(far.id),
        }
        async with asyncio.timeout(2 * PATIENCE_S):
            ends = await asyncio.gather(*(call() for call in calls.values()), return_exceptions=True)
        kinds = (ProviderUnavailable, AgentError)
        assert {name: end for name, end in zip(calls, ends, strict=True) if not isinstance(end, kinds)} == {}
        await world.seen("n2", online=False)
        await until(manager, {near.id: State.READY, far.id: State.LOST})
        assert (await near.exec(["true"])).ok
        world.cluster.join_again("n2")
        await world.seen("n2", online=True)
        await until(manager, {near.id: State.READY, far.id: State.READY})
        assert "n2" not in {world.places()[each.id] for each in made}
        assert (await manager.execute(far.id, ["echo", "back"])).text == "back\n"


async def test_reconcile_tells_what_it_did(world: World) -> None:
    async with world.manager() as manager:
        far = await manager.create(image=IMAGE, target="n3")
        world.cluster.kill("n3")
        lost = await manager.reconcile()
        assert [(each.id, each.action) for each in lost] == [(far.id, Action.LOST)]
        assert await manager.reconcile() == []
        await world.revive()
        found = await manager.reconcile()
        assert [(each.id, each.action) for each in found] == [(far.id, Action.ADOPT)]


async def test_any_member_can_be_asked_from_afar(world: World, cache: Path, tmp_path: Path) -> None:
    """By a certificate that the cluster trusts, over TLS."""
    certificate, key = tmp_path / "client.crt", tmp_path / "client.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=skerry", "-out", str(certificate), "-keyout", str(key)]
    await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True, timeout=10)
    der = base64.b64encode(ssl.PEM_cert_to_DER_cert(certificate.read_text())).decode()
    world.cluster.ask("POST", "/1.0/certificates", {"type": "client", "name": "skerry", "certificate": der})
    secrets = {"certificate": str(certificate), "key": str(key)}
    secrets["server_certificate"] = str(world.cluster.members["n1"].folder / "cluster.crt")
    async with world.manager(host=world.cluster.members["n2"].https, **secrets) as manager:
        sandbox = await manager.create(image=IMAGE, target="n3")
        assert (await sandbox.exec(["cat"], stdin=b"from afar")).stdout == b"from afar"
        assert world.places() == {sandbox.id: "n3"}


async def until(manager: AsyncSandboxManager, wanted: dict[SandboxId, State]) -> None:
    """Reconcile until the sandboxes are in these states."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            await manager.reconcile()
        except ProviderError as error:
            told = str(error)
        else:
            told = ""
        states = {id: (await manager.record(id)).state for id in wanted}
        if states == wanted:
            return
        assert time.monotonic() < end, f"they are {states} after {PATIENCE_S:g} s: {told}"
        await asyncio.sleep(0.1)
