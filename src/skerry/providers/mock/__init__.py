"""The provider for tests: sandboxes of coroutines and temporary folders, virtual time, programs of your own, faults.

The agent is the real one (`skerry.agent.guest`), run in this process by `agent.py`. Import from here only.
"""

from skerry.providers.mock.clock import Clock
from skerry.providers.mock.host import Faults, Host
from skerry.providers.mock.process import Connection, Context, Listener, Program
from skerry.providers.mock.provider import Mock

__all__ = ["Clock", "Connection", "Context", "Faults", "Host", "Listener", "Mock", "Program"]
