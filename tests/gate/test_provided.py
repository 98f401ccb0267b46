"""Values of secrets from a program's environment: given to the gate, changed live, and given again after its death."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from skerry.errors import InvalidSpec
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.secrets import Secret
from skerry.sandbox.sandbox import AsyncSandbox

from .installation import installed
from .own_gate import kill_gate
from .world import World

pytestmark = pytest.mark.timeout(120)

VARIABLE = "TOKEN_OF_TESTS"


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def sent(sandbox: AsyncSandbox, world: World) -> tuple[int | None, str]:
    """How a request fared, and what came to its host as the token."""
    page = f"https://{world.rule('api.test', 'https')}/hello"
    before = len(world.seen())
    done = await sandbox.exec(f'curl -fsS -H "X-Token: $API_TOKEN" {page}', timeout_s=30)
    return done.exit_code, json.dumps(world.seen()[before:])


async def test_a_value_is_changed_live_and_given_again_after_the_death_of_the_gate(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "value-one")
    secret = Secret(hosts=(world.rule("api.test", "https"),), env=VARIABLE)
    with installed(place, world) as config:
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(secrets={"API_TOKEN": secret}, name="it")
            assert "value-one" in (await sent(sandbox, world))[1]

            monkeypatch.setenv(VARIABLE, "value-two")
            await manager.get("it")  # who only comes by changes nothing
            assert "value-one" in (await sent(sandbox, world))[1]
            await sandbox.network.provide({"API_TOKEN": "value-three"})
            assert "value-three" in (await sent(sandbox, world))[1]

            monkeypatch.delenv(VARIABLE)
            kill_gate(Path(config.state_dir))
            await manager.get("it")  # it starts the gate, and has no value to give
            code, told = await sent(sandbox, world)
            assert (code, "value" in told) == (22, False)  # 502, and nothing was sent
            monkeypatch.setenv(VARIABLE, "value-four")
            await manager.get("it")
            assert "value-four" in (await sent(sandbox, world))[1]
            for wrong in ("NONE", "api_token"):
                with pytest.raises(InvalidSpec, match="none of that name"):
                    await sandbox.network.provide({wrong: "x"})
            await manager.destroy("it")
