"""Documents: what a server keeps beside sandboxes, such as tenants and tokens, each kind in a collection of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from skerry.errors import Conflict, NotFound, StoreCorrupt
from skerry.store import rows
from skerry.store.base import Database, Transaction

T = TypeVar("T")
_COLUMNS = "id, project, version, created_at, body"


class Document(msgspec.Struct, Generic[T], frozen=True):
    """A document, whose it is, and the version that a change of it names."""

    id: str
    project: str
    """Empty for what is nobody's but the host's."""
    version: int
    created_at: float
    body: T


class Collection(Generic[T]):
    """All documents of a kind. With a `project` only those of that one are there, as if there were no others."""

    def __init__(self, database: Database, kind: str, type: type[T], project: str | None = None) -> None:
        self._database = database
        self._kind = kind
        self._type = type
        self._project = project

    async def add(self, id: str, body: T, *, project: str = "") -> Document[T]:
        """Add a document. Raises Conflict if the id is taken."""
        owner = project if self._project is None else self._project
        made = Document(id, owner, 1, time.time(), body)

        def work(tx: Transaction) -> None:
            if tx.rows("SELECT 1 FROM documents WHERE kind = ? AND id = ?", self._kind, id):
                raise Conflict(f"there is a {self._kind} {id!r} already")
            values = (self._kind, made.id, made.project, made.version, made.created_at, rows.to_json(body))
            tx.execute(f"INSERT INTO documents (kind, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", *values)

        await self._database.transact(work)
        return made

    async def get(self, id: str) -> Document[T]:
        """Raises NotFound."""
        return await self._database.transact(lambda tx: self._get(tx, id), write=False)

    async def replace(self, id: str, body: T, *, version: int | None = None) -> Document[T]:
        """Put another body in its place. Raises NotFound, and Conflict if it has another `version` by now."""

        def work(tx: Transaction) -> Document[T]:
            found = self._get(tx, id)
            if version is not None and found.version != version:
                raise Conflict(f"the {self._kind} {id!r} was changed by somebody else: look again")
            changed: Document[T] = msgspec.structs.replace(found, version=found.version + 1, body=body)
            sql = "UPDATE documents SET version = ?, body = ? WHERE kind = ? AND id = ?"
            tx.execute(sql, changed.version, rows.to_json(body), self._kind, id)
            return changed

        return await self._database.transact(work)

    async def list(self, *, after: str = "", limit: int = 1000) -> Sequence[Document[T]]:
        """Those with ids after that one, in the order of their ids."""
        mine, params = self._mine()
        sql = f"SELECT {_COLUMNS} FROM documents WHERE kind = ? AND id > ?{mine} ORDER BY id LIMIT ?"
        return await self._database.transact(
            lambda tx: [self._read(row) for row in tx.rows(sql, self._kind, rows.clean(after), *params, limit)],
            write=False,
        )

    async def remove(self, id: str) -> None:
        """Raises NotFound."""

        def work(tx: Transaction) -> None:
            self._get(tx, id)
            tx.execute("DELETE FROM documents WHERE kind = ? AND id = ?", self._kind, id)

        await self._database.transact(work, frees=True)

    def _mine(self) -> tuple[str, tuple[str, ...]]:
        return ("", ()) if self._project is None else (" AND project = ?", (self._project,))

    def _get(self, tx: Transaction, id: str) -> Document[T]:
        mine, params = self._mine()
        sql = f"SELECT {_COLUMNS} FROM documents WHERE kind = ? AND id = ?{mine}"
        for row in tx.rows(sql, self._kind, rows.clean(id), *params):
            return self._read(row)
        raise NotFound(f"there is no {self._kind} {id!r}")

    def _read(self, row: tuple[Any, ...]) -> Document[T]:
        try:
            id, project, version, created_at, body = row
            return Document(id, project, version, created_at, msgspec.json.decode(body, type=self._type))
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreCorrupt(f"the registry's {self._kind} {row[0]} cannot be read: {error}") from error
