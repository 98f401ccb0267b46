"""Making, migrating and refusing registries, on every database."""

from __future__ import annotations

import pytest

from skerry import clock
from skerry.errors import Conflict, StoreError, StoreTooNew
from skerry.model.records import Owner
from skerry.model.spec import Spec, new_id
from skerry.store import Store, schema

OWNER = Owner("host", 1, 1)


async def version_of(store: Store) -> str:
    rows = await store._database.transact(
        lambda tx: tx.rows("SELECT value FROM meta WHERE name = 'version'"), write=False
    )
    return str(rows[0][0])


async def test_an_older_registry_is_brought_up_to_date_and_keeps_what_it_knows(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await Store.open(url)
    record, _ = await old.reserve(new_id(), Spec(), owner=OWNER, boot_id="")
    await old.aclose()
    newer = ("ALTER TABLE sandboxes ADD COLUMN mood TEXT", "UPDATE sandboxes SET mood = 'calm'")
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, newer])
    new = await Store.open(url)
    assert new.instance == old.instance
    assert await new.get(record.id) == record
    assert await version_of(new) == str(len(schema.MIGRATIONS))
    assert await new._database.transact(lambda tx: list(tx.rows("SELECT mood FROM sandboxes"))) == [("calm",)]
    await new.aclose()


async def test_a_registry_of_the_first_version_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        old = await Store.open(url)
        await old._database.transact(
            lambda tx: tx.execute(
                "INSERT INTO sandboxes (id, seq, version, state, project, provider, spec, owner, enforced, detail, "
                "cid, boot_id, created_at, updated_at, ephemeral, doomed, booting) VALUES "
                "('x', 1, 1, 'ready', 'default', 'local', ?, ?, '{}', '', 3, '', 1, 1, 0, 1, 0)",
                '{"lifetime_s": 100}',
                '{"host": "h", "pid": 1, "started": 1}',
            )
        )
        await old.aclose()
    new = await Store.open(url)
    (record,) = await new.list()
    assert (record.doomed, record.volumes, record.remaker) == (True, False, None)
    assert (record.written, record.end, record.left_s(clock.now())) == (None, None, 100)
    await new.note_ends([record])
    (noted,) = await new.list()
    assert (noted.version, noted.left_s(clock.now())) == (record.version, pytest.approx(100, abs=30))
    changed = await new.change(record, volumes=True, remaker=OWNER, boot_id="another")
    assert await new.get(record.id) == changed
    assert (changed.volumes, changed.remaker, changed.boot_id) == (True, OWNER, "another")
    await new.aclose()


async def test_numbers_that_no_machine_had_go_and_all_else_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    insert = (
        "INSERT INTO sandboxes (id, seq, version, state, project, provider, name, key, spec, owner, enforced, detail, "
        "cid, boot_id, created_at, updated_at, ephemeral, doomed, booting, env) VALUES "
        "(?, ?, 1, 'ready', 'p', 'local', ?, ?, '{}', ?, '{}', '', ?, 'boot', 1, 2, 0, 0, 0, '{}')"
    )
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:4])
        old = await Store.open(url)
        for seq, id in enumerate(("x", "y"), 1):
            note = "INSERT INTO events VALUES (?, 1, ?, 'created', 'ready', NULL, '{}')"
            owner = '{"host": "h", "pid": 1, "started": 1}'
            await old._database.transact(
                lambda tx, seq=seq, id=id, owner=owner: tx.execute(insert, id, seq, f"n-{id}", id, owner, seq + 2)  # type: ignore[misc]
            )
            await old._database.transact(lambda tx, seq=seq, id=id, note=note: tx.execute(note, seq, id))  # type: ignore[misc]
        await old._database.transact(lambda tx: tx.execute("UPDATE counters SET value = 2 WHERE name = 'event'"))
        await old.aclose()
    new = await Store.open(url)
    assert [(record.id, record.boot_id, record.key) for record in await new.list()] == [
        ("x", "boot", "x"),
        ("y", "boot", "y"),
    ]
    assert [(event.seq, event.sandbox) for event in await new.events()] == [(1, "x"), (2, "y")]
    assert not await new._database.transact(lambda tx: list(tx.rows("SELECT 1 FROM counters WHERE name = 'cid'")))
    with pytest.raises(Conflict):
        await new.reserve(new_id(), Spec(project="p", name="n-x"), owner=OWNER, boot_id="")
    record, _ = await new.reserve(new_id(), Spec(), owner=OWNER, boot_id="")
    assert [event.seq for event in await new.events()] == [1, 2, 3]
    assert await new.get(record.id) == record
    await new._database.transact(lambda tx: tx.execute("DELETE FROM sandboxes WHERE id = 'x'"))
    assert [event.seq for event in await new.events()] == [2, 3], "events go with their record, as before"
    await new.aclose()


async def test_a_migration_that_fails_leaves_the_registry_as_it_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await Store.open(url)
    await old.aclose()
    with monkeypatch.context() as patch:
        broken = ("ALTER TABLE sandboxes ADD COLUMN mood TEXT", "THIS IS NOT SQL")
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
        with pytest.raises(StoreError, match=r"refused .* syntax error"):
            await Store.open(url)
    again = await Store.open(url)
    assert await version_of(again) == str(len(schema.MIGRATIONS))
    await again.reserve(new_id(), Spec(), owner=OWNER, boot_id="")
    await again.aclose()


async def test_a_registry_of_a_newer_version_is_refused_and_left_alone(store: Store, url: str) -> None:
    await store._database.transact(lambda tx: tx.execute("UPDATE meta SET value = '99' WHERE name = 'version'"))
    with pytest.raises(StoreTooNew, match="schema is 99"):
        await Store.open(url)
    assert await version_of(store) == "99"
