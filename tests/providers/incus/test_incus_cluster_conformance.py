"""The conformance suite on a real cluster, where every second box is on a member that is not the one that is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines.incus_cluster import Cluster
from engines.incusd import IMAGE
from test_incus_conformance import _Incus

from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.incus import Incus


class TestIncusCluster(_Incus):
    idle_processes = 2  # the agent, and the relay that we reach it by

    @pytest.fixture
    def make_provider(self, incus_cluster: Cluster, cache: Path) -> Callable[[], Provider]:
        type(self).daemon = incus_cluster.members["n1"]
        self.options = {"image": IMAGE}
        config = Incus.Config(host=incus_cluster.address, cache_dir=str(cache))
        return lambda: Incus(config)

    def refused(self, provider: Provider) -> list[Spec]:
        return [spec for spec in super().refused(provider) if spec.target is None]
