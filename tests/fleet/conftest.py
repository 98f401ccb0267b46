from __future__ import annotations

from manager.conftest import host, manager, mock, store

__all__ = ["host", "manager", "mock", "store"]
