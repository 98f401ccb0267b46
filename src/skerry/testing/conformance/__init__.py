"""What every provider promises, as tests that any provider can be held against.

A provider's test file subclasses `ProviderConformance` with a `make_provider` fixture and `on_host`, the outside
witness.
"""

from skerry.testing.conformance.base import Suite
from skerry.testing.conformance.ends import EndTests
from skerry.testing.conformance.execution import ExecTests
from skerry.testing.conformance.files import FileTests
from skerry.testing.conformance.lifecycle import BoxTests, LifecycleTests
from skerry.testing.conformance.limits import LimitTests
from skerry.testing.conformance.network import NetworkTests
from skerry.testing.conformance.verbs import VerbTests


class ProviderConformance(
    LifecycleTests, ExecTests, FileTests, BoxTests, LimitTests, NetworkTests, VerbTests, EndTests
):
    """The whole suite."""


__all__ = ["ProviderConformance", "Suite"]
