"""Containers that are prepared for rules, whatever their image has, and their engine does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.errors import CreateFailed
from skerry.model.spec import Network, Spec
from skerry.providers.base import ImageBuild
from skerry.providers.dockerapi import EngineProvider, profile
from skerry.providers.shared import loopback
from skerry.testing.conformance.base import make

NAME = "skerry-test/own-resolver"
READ = f"cat {loopback.LOW_PORTS_FILE} {loopback.RESOLV_CONF}; tail -n +2 /proc/net/route"


@pytest.fixture(params=["docker", "podman"])
def provider(request: pytest.FixtureRequest) -> EngineProvider:
    found: EngineProvider = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def image(provider: EngineProvider, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An image with a resolver of its own."""
    base = request.getfixturevalue(f"{provider.name}_images")["busybox"]
    context = tmp_path / "context"
    context.mkdir()
    (context / "resolv.conf").write_text("nameserver 203.0.113.53\nsearch corp.example\n")
    text = f"FROM {base}\nCOPY resolv.conf {loopback.RESOLV_CONF}\n"
    await provider.build_image(ImageBuild(dockerfile=text, name=NAME, context=context), lambda _: None)
    yield NAME
    await provider.remove_image(NAME)


async def test_an_images_own_resolver_is_covered_by_ours(provider: EngineProvider, image: str) -> None:
    for options in ({}, {"writable_root": True}):
        spec = Spec.parse({"provider": provider.name, "image": image, "network": "rules", "data": False, **options})
        sandbox = await make(spec, provider)
        try:
            first, *lines = (await sandbox.exec(READ)).text.splitlines()
            assert first == "0"
            assert [line for line in lines if not line.startswith(("#", "options"))] == ["nameserver 127.0.0.1"]
            assert sandbox.enforced["network"].by == loopback.BY_RULES
        finally:
            await sandbox.destroy()


async def test_a_container_that_the_engine_did_not_prepare_is_no_box(
    provider: EngineProvider, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_loopback", lambda quirks: {"Sysctls": {loopback.LOW_PORTS: "1024"}})
    image = request.getfixturevalue(f"{provider.name}_images")["busybox"]
    with pytest.raises(CreateFailed, match=loopback.LOW_PORTS):
        await make(Spec(provider=provider.name, image=image, network=Network.RULES), provider)
    assert await provider.discover() == {}


async def test_doctor_tells_that_rules_can_be_had(provider: EngineProvider) -> None:
    assert (await provider.describe())["rules"].by == loopback.BY_RULES
