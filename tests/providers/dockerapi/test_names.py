"""Names and addresses as people write them, and what engines make of them."""

from __future__ import annotations

import pytest

from skerry.errors import ConfigError
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import containers


@pytest.mark.parametrize("host", ["tcp://localhost:abc", "tcp://localhost:99999", "tcp://", "docker.sock"])
def test_an_address_that_is_none_is_the_configurations_error(host: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Docker(Docker.Config(host=host))


@pytest.mark.parametrize("tag", ["app:latest", "localhost/app:latest", "docker.io/app:latest"])
def test_a_short_name_is_found_wherever_an_engine_keeps_it(tag: str) -> None:
    assert containers._whole("app", {tag: "id"}) == tag


def test_a_short_name_is_also_one_of_the_hub_s_own() -> None:
    """Podman calls what it built so."""
    tag = "docker.io/library/app:latest"
    assert containers._whole("app", {tag: "id"}) == tag
    assert containers._whole("app", {"localhost/app:latest": "", tag: ""}) == "localhost/app:latest"
