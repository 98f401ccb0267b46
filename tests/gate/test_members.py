from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manager.world import config_of, until

from skerry.errors import AgentError, AgentUnreachable, CallInterrupted, NotFound
from skerry.gate import members as gate_members
from skerry.gate.base import Duplex, Members, Policy
from skerry.gate.decide import ports_of
from skerry.gate.members import FleetMembers, reach_of
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import ASIDE_LABEL, FLEET_LABEL, INDEX_LABEL, PHASE_LABEL, Record
from skerry.model.rules import Rules
from skerry.model.spec import Spec, new_id
from skerry.net.stream import Stream
from skerry.providers.base import Provider
from skerry.providers.mock import Connection, Context, Host, Mock

PORT = 5432


async def said(tunnel: Duplex) -> bytes:
    """All that comes until the end."""
    found = b""
    while data := await tunnel.read():
        found += data
    return found


class Fleet:
    """Members of fleets, made one by one, and the gate's way to them."""

    def __init__(self, manager: AsyncSandboxManager, mock: Mock) -> None:
        self.manager = manager
        self.mock = mock
        self.members: Members = FleetMembers(manager.store, self.provider)

        @mock.program("whod")
        async def whod(context: Context) -> None:
            listener = context.listen(PORT)
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(serve(await listener.accept(), context.argv[1].encode()))

        async def serve(peer: Connection, name: bytes) -> None:
            with suppress(OSError):  # a peer that has gone
                await peer.writer.write(name)
                await peer.writer.write(await peer.reader.read_all())
            peer.close()

    async def provider(self, _name: str) -> Provider:
        return self.mock

    async def add(
        self, name: str, *reach: str, fleet: str = "crew", project: str = "crew", serves: bool = True
    ) -> Record:
        """A member `agent-PHASE-INDEX` whose server says its name."""
        phase, _, index = name.removeprefix("agent-").rpartition("-")
        labels = {FLEET_LABEL: fleet, PHASE_LABEL: phase, INDEX_LABEL: str(int(index))}
        spec = Spec(provider="mock", name=name, project=project, labels=labels)
        record = await self.manager.handles.make(new_id(), self.manager.config.complete(spec))
        if serves:
            await self.manager.handles.of(record).start(["whod", name], background=True)
        return await self.change(record, reach=reach) if reach else record

    async def change(self, record: Record, ephemeral: bool | None = None, **fields: object) -> Record:
        """Write another spec of it down; the box stays as it is."""
        record = await self.manager.store.get(record.id)
        spec = msgspec.structs.replace(record.spec, **fields)
        return await self.manager.store.change(record, spec=spec, ephemeral=ephemeral)

    async def ask(self, record: Record, name: str, port: int = PORT) -> str:
        """The name that a server says to a member."""
        tunnel, _ = await self.members.dial(Policy(id=record.id, rules=Rules()), name, port)
        await tunnel.close_write()
        name = await said(tunnel)
        await tunnel.close()
        return name.decode()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    mock = Mock(host=Host())
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as manager:
        fleet = Fleet(manager, mock)
        yield fleet
        assert isinstance(fleet.members, FleetMembers)
        fleet.members.close()
        await manager.destroy_all()


async def test_a_member_reaches_another_by_the_names_of_phase_and_member(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001")
    assert await fleet.ask(web, "db") == "agent-db-001"
    assert await fleet.ask(web, "agent-db-001") == "agent-db-001"


async def test_bytes_go_both_ways(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    db = await fleet.add("agent-db-001")
    tunnel, member = await fleet.members.dial(Policy(id=web.id, rules=Rules()), "db", PORT)
    assert member == db.id
    await tunnel.write(b", and you?" * 100_000)
    await tunnel.close_write()
    assert await said(tunnel) == b"agent-db-001" + b", and you?" * 100_000
    await tunnel.close()


async def test_the_members_of_a_phase_take_turns(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    for index in (1, 2, 3):
        await fleet.add(f"agent-db-00{index}")
    names = [await fleet.ask(web, "db") for _ in range(6)]
    assert len(set(names[:3])) == 3
    assert names[3:] == names[:3]


async def test_a_member_that_does_not_listen_is_passed_over(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001", serves=False)
    await fleet.add("agent-db-002")
    assert {await fleet.ask(web, "db") for _ in range(3)} == {"agent-db-002"}
    with pytest.raises(NotFound, match=f"nothing answers on port {PORT}"):
        await fleet.ask(web, "agent-db-001")


async def test_an_alias_is_known_to_those_that_have_it(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"store=db:{PORT}", f"first.example=agent-db-001:{PORT}")
    await fleet.add("agent-db-001")
    other = await fleet.add("agent-other-001", f"db:{PORT}")
    assert await fleet.ask(web, "store") == await fleet.ask(web, "first.example") == "agent-db-001"
    for record, name in ((web, "db"), (web, "agent-db-001"), (other, "store")):
        with pytest.raises(NotFound, match=f"does not name {name}:"):
            await fleet.ask(record, name)


async def test_a_name_that_two_phases_have_leads_to_both(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"store=one:{PORT}", f"store=two:{PORT}")
    await fleet.add("agent-one-001")
    await fleet.add("agent-two-001")
    assert {await fleet.ask(web, "store") for _ in range(2)} == {"agent-one-001", "agent-two-001"}


@pytest.mark.parametrize("name", ["db", "agent-db-001", "agent-web-001", "nobody"])
async def test_what_reach_does_not_name_is_refused(fleet: Fleet, name: str) -> None:
    web = await fleet.add("agent-web-001", "db:1", f"cache:{PORT}")
    await fleet.add("agent-db-001")
    with pytest.raises(NotFound, match=f"does not name {name}:{PORT}"):
        await fleet.ask(web, name)


@pytest.mark.parametrize(("name", "project"), [("other", "crew"), ("crew", "other"), ("other", "other")])
async def test_members_of_another_fleet_or_project_are_out_of_reach(fleet: Fleet, name: str, project: str) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}", fleet=name, project=project)
    await fleet.add("agent-db-001")
    assert reach_of(web) == {"db": {PORT}, "agent-db-*": {PORT}}
    with pytest.raises(NotFound, match="db: no member is ready"):
        await fleet.ask(web, "db")


async def test_a_sandbox_of_no_fleet_reaches_nobody(fleet: Fleet) -> None:
    await fleet.add("agent-db-001")
    alone = await fleet.add("agent-web-001", f"db:{PORT}")
    alone = await fleet.change(alone, labels={})
    assert reach_of(alone) == {}
    with pytest.raises(NotFound):
        await fleet.ask(alone, "db")


async def test_a_change_of_the_record_holds_for_the_next_connection(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001")
    assert await fleet.ask(web, "db") == "agent-db-001"
    await fleet.change(web, reach=(f"cache:{PORT}",))
    with pytest.raises(NotFound, match="does not name"):
        await fleet.ask(web, "db")
    await fleet.manager.destroy(web.id)
    with pytest.raises(NotFound, match="has ended"):
        await fleet.ask(web, "db")


async def test_a_member_that_is_paused_or_gone_is_refused_with_the_reason(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    db = await fleet.add("agent-db-001")
    await fleet.manager.pause(db.id)
    with pytest.raises(NotFound, match="agent-db-001 is paused"):
        await fleet.ask(web, "db")
    await fleet.manager.resume(db.id)
    assert await fleet.ask(web, "db") == "agent-db-001"
    await fleet.manager.destroy(db.id)
    with pytest.raises(NotFound, match=r"db: no member is ready\Z"):
        await fleet.ask(web, "db")


async def test_a_member_that_was_replaced_is_found_anew(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    old = await fleet.add("agent-db-001")
    assert await fleet.ask(web, "agent-db-001") == "agent-db-001"
    await fleet.manager.destroy(old.id)
    await fleet.add("agent-db-001")
    assert await fleet.ask(web, "agent-db-001") == "agent-db-001"


async def test_a_predecessor_serves_until_its_successor_is_decided(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    old = await fleet.add("agent-db-001", serves=False)
    await fleet.manager.handles.of(old).start(["whod", "the old one"], background=True)
    await fleet.change(old, name="agent-db-001.old", labels={**old.spec.labels, ASIDE_LABEL: "1"})
    new = await fleet.change(await fleet.add("agent-db-001"), ephemeral=True)
    assert [await fleet.ask(web, name) for name in ("db", "agent-db-001", "db")] == ["the old one"] * 3
    await fleet.change(new, ephemeral=False)
    assert [await fleet.ask(web, name) for name in ("db", "agent-db-001", "db")] == ["agent-db-001"] * 3


async def test_members_on_trial_reach_each_other_if_there_are_no_others(fleet: Fleet) -> None:
    one = await fleet.change(await fleet.add("agent-db-001", f"db:{PORT}"), ephemeral=True)
    await fleet.change(await fleet.add("agent-db-002"), ephemeral=True)
    assert await fleet.ask(one, "agent-db-002") == "agent-db-002"


async def test_all_names_of_what_is_reached_are_known_whoever_is_there(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", "db:1", "db:2", "store=db:3", "agent-cache-002:80")
    policy = Policy(id=web.id, rules=Rules(), reach=reach_of(web))
    ports = {
        "db": {1, 2},
        "agent-db-001": {1, 2},
        "agent-db-1000": {1, 2},
        "store": {3},
        "agent-cache-002": {80},
    }
    for name, expected in ports.items():
        assert ports_of(policy, name) == expected
    for name in ("web", "agent-web-001", "agent-store-001", "agent-cache-001", "agent-db-1", "agent-db-", "cache"):
        assert ports_of(policy, name) == set()


class Counted:
    """A provider that counts its dials, or fails them."""

    def __init__(self, mock: Mock) -> None:
        self.mock = mock
        self.streams: list[Stream] = []
        self.failure: Exception | None = None

    async def dial(self, id: str) -> Stream:
        if self.failure is not None:
            raise self.failure
        self.streams.append(await self.mock.dial(id))
        return self.streams[-1]


@pytest.fixture
def counted(fleet: Fleet) -> Counted:
    counted = Counted(fleet.mock)

    async def provider(_name: str) -> Any:
        return counted

    fleet.members = FleetMembers(fleet.manager.store, provider)
    return counted


async def test_one_stream_to_a_member_serves_all_and_is_closed_when_nobody_uses_it(
    fleet: Fleet, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_members, "_UNUSED_S", 0.01)
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001")
    policy = Policy(id=web.id, rules=Rules())
    dialled = await asyncio.gather(*(fleet.members.dial(policy, "db", PORT) for _ in range(20)))
    tunnels = [tunnel for tunnel, _ in dialled]
    assert len(counted.streams) == 1
    for tunnel in tunnels[1:]:
        await tunnel.close()
    await tunnels[0].close_write()
    assert await tunnels[0].read() == b"agent-db-001"
    assert counted.streams[0].is_open
    await tunnels[0].close()

    async def is_closed() -> bool:
        return not counted.streams[0].is_open

    await until(is_closed)
    assert await fleet.ask(web, "db") == "agent-db-001"
    assert len(counted.streams) == 2


async def test_connections_and_streams_are_bounded(
    fleet: Fleet, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_members, "_MOST_LINKS", 4)
    monkeypatch.setattr(gate_members, "_MOST_STREAMS", 1)
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    modest = await fleet.add("agent-web-002", f"db:{PORT}")
    await fleet.add("agent-db-001")
    policy = Policy(id=web.id, rules=Rules())
    tunnels = [(await fleet.members.dial(policy, "db", PORT))[0] for _ in range(2)]
    with pytest.raises(AgentUnreachable, match="2 connections already"):
        await fleet.members.dial(policy, "db", PORT)
    assert await fleet.ask(modest, "db") == "agent-db-001"
    await fleet.add("agent-db-002")
    with pytest.raises(AgentUnreachable, match="1 members are connected to"):
        await fleet.members.dial(policy, "agent-db-002", PORT)
    for tunnel in tunnels:
        await tunnel.close()
    assert await fleet.ask(web, "agent-db-002") == "agent-db-002"


async def test_a_stream_that_broke_is_dialled_again(fleet: Fleet, counted: Counted) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001")
    policy = Policy(id=web.id, rules=Rules())
    tunnel, _ = await fleet.members.dial(policy, "db", PORT)
    counted.streams[0].close()
    with pytest.raises(CallInterrupted):
        await said(tunnel)
    assert await fleet.ask(web, "db") == "agent-db-001"


@pytest.mark.parametrize("failure", [OSError("no descriptor is left"), AgentUnreachable("nobody is there")], ids=str)
async def test_a_member_that_cannot_be_reached_is_an_error_of_the_agent(
    fleet: Fleet, counted: Counted, failure: Exception
) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    await fleet.add("agent-db-001")
    counted.failure = failure
    with pytest.raises(AgentError, match=str(failure)):
        await fleet.ask(web, "db")


async def test_a_member_that_does_not_answer_is_given_up(
    fleet: Fleet, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_members, "_ANSWER_S", 0.05)
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    db = await fleet.add("agent-db-001")
    await fleet.mock.pause(db.id)  # by hand: the registry does not know
    try:
        with pytest.raises(AgentUnreachable, match="agent-db-001"):
            await fleet.ask(web, "db")
    finally:
        await fleet.mock.resume(db.id)


async def test_who_gives_up_leaves_no_stream(fleet: Fleet, counted: Counted) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    db = await fleet.add("agent-db-001")
    await fleet.mock.pause(db.id)
    try:
        dialling = asyncio.create_task(fleet.ask(web, "db"))

        async def is_dialled() -> bool:
            return bool(counted.streams)

        await until(is_dialled)
        dialling.cancel()
        await asyncio.wait([dialling])
        assert not counted.streams[0].is_open
    finally:
        await fleet.mock.resume(db.id)
    assert await fleet.ask(web, "db") == "agent-db-001"


async def test_the_command_of_a_member_that_was_started_again_is_begun(fleet: Fleet) -> None:
    web = await fleet.add("agent-web-001", f"db:{PORT}")
    db = await fleet.add("agent-db-001", serves=False)
    await fleet.change(db, command=("whod", "begun"))

    async def is_begun() -> bool:
        with suppress(NotFound):  # until it listens
            return await fleet.ask(web, "db") == "begun"
        return False

    await until(is_begun)
