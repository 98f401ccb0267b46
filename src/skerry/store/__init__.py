"""The registry: what is known of every sandbox, shared by all processes that use an installation."""

from skerry.store.store import Store

__all__ = ["Store"]
