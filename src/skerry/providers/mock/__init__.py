"""The provider for tests: sandboxes in memory, with virtual time, programs of your own, and faults on demand."""

from skerry.providers.mock.clock import Clock
from skerry.providers.mock.context import Connection, Context, Listener
from skerry.providers.mock.faults import Faults
from skerry.providers.mock.host import Host
from skerry.providers.mock.kernel import Program
from skerry.providers.mock.provider import Mock

__all__ = ["Clock", "Connection", "Context", "Faults", "Host", "Listener", "Mock", "Program"]
