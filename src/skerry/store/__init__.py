"""The registry: records and events of every sandbox, shared by all processes of an installation.

From outside: `Store` and `Changes`. The databases behind it, SQLite and PostgreSQL, are loaded when they are needed.
"""

from skerry.store.store import Changes, Store

__all__ = ["Changes", "Store"]
