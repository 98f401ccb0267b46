"""Making, migrating and refusing registries, on every database."""

from __future__ import annotations

import pytest

from skerry.errors import StoreError, StoreTooNew
from skerry.records import Owner
from skerry.spec import Spec, new_id
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
                "('x', 1, 1, 'ready', 'default', 'local', '{}', ?, '{}', '', 3, '', 1, 1, 0, 1, 0)",
                '{"host": "h", "pid": 1, "started": 1}',
            )
        )
        await old.aclose()
    new = await Store.open(url)
    (record,) = await new.list()
    assert (record.doomed, record.volumes, record.remaker) == (True, False, None)
    changed = await new.change(record, volumes=True, remaker=OWNER, boot_id="another")
    assert await new.get(record.id) == changed
    assert (changed.volumes, changed.remaker, changed.boot_id) == (True, OWNER, "another")
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
