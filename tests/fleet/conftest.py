from __future__ import annotations

from manager.conftest import host, host_clock, manager, mock, store

__all__ = ["host", "host_clock", "manager", "mock", "store"]
