"""A secret is used by code that never has it: it arrives where it should, and is nowhere in the box, nor in what is
kept of the box."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from engines.daemons import Daemon

from skerry.manager.manager import AsyncSandboxManager
from skerry.model.secrets import Secret

from .installation import host_root, installed, is_usr_merged
from .search import in_files, in_processes, in_root_of, processes_of
from .world import World

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the memory of a box's processes"),
]

VARIABLE = "TOKEN_OF_TESTS"
USE = """
import base64, os, ssl, sys, urllib.request
token, page = os.environ["API_TOKEN"], sys.argv[1]
trust = ssl.create_default_context()
basic = base64.b64encode(b"user:" + token.encode()).decode()
for fields in ({"Authorization": "Bearer " + token}, {"Authorization": "Basic " + basic}, {"X-Api-Key": token}):
    answer = urllib.request.urlopen(urllib.request.Request(page, headers=fields), context=trust, timeout=30)
    body = answer.read()
answer = urllib.request.urlopen(page + "?key=" + token, context=trust, timeout=30)
print(token, body, flush=True)
open(os.path.expanduser("~/used"), "w").write(token)
sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="skerry-gate-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def value(monkeypatch: pytest.MonkeyPatch) -> str:
    value = f"tok-{secrets.token_hex(24)}"
    monkeypatch.setenv(VARIABLE, value)
    return value


def arrived(world: World, value: str) -> dict[str, int]:
    """How often the value came to which host."""
    found: dict[str, int] = {}
    for each in world.seen():
        if value in json.dumps(each) or _basic(value) in json.dumps(each):
            found[each["host"]] = found.get(each["host"], 0) + 1
    return found


def _basic(value: str) -> str:
    import base64

    return base64.b64encode(f"user:{value}".encode()).decode()


@pytest.mark.usefixtures("local_rules")
async def test_a_secret_arrives_and_is_nowhere_in_the_box(
    world: World, place: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    page = f"https://{world.rule('api.test', 'https')}/hello"
    secret = Secret(hosts=(world.rule("api.test", "https"),), env=VARIABLE)
    with installed(place, world) as config:
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(secrets={"API_TOKEN": secret}, allow=[world.rule("web.test", "http")])
            user = await sandbox.start(["python3", "-c", USE, page], stdin=True)
            _, said = await anext(aiter(user))
            placeholder = said.split()[0].decode()
            assert placeholder.startswith("skerry-secret-API_TOKEN-"), said
            assert arrived(world, value) == {"api.test": 4}
            core = await sandbox.exec("ulimit -c unlimited; python3 -c 'import os; os.abort()'; ls")
            pids = processes_of(sandbox.id)
            assert len(pids) > 1
            for known in (value.encode(), _basic(value).encode()):
                assert in_processes(known, pids) == []
                assert in_root_of(known, min(pids)) == []
                assert in_files(known, config.state_dir) == []
            assert in_processes(placeholder.encode(), pids) != []  # the search does find what is there
            assert in_root_of(placeholder.encode(), min(pids)) != []
            record = await manager.record(sandbox.id)
            for told in (repr(record), repr(sandbox), caplog.text, core.text, core.stderr.decode(), said.decode()):
                assert value not in told
            await user.kill()
            await manager.destroy(sandbox.id)
        assert in_files(value.encode(), config.state_dir) == []
        assert in_files(b'"secrets":["API_TOKEN"]', f"{config.state_dir}/ledger") != []


@pytest.mark.usefixtures("local_rules")
async def test_another_host_gets_the_placeholder_as_it_is(world: World, place: Path, value: str) -> None:
    secret = Secret(hosts=(world.rule("api.test", "https"),), env=VARIABLE)
    with installed(place, world) as config:
        async with AsyncSandboxManager(config) as manager:
            sandbox = await manager.create(secrets={"API_TOKEN": secret}, allow=[world.rule("web.test", "http")])
            page = f"http://{world.rule('web.test', 'http')}/hello"
            sent = await sandbox.exec(f'curl -fsS -H "Authorization: Bearer $API_TOKEN" {page}')
            assert sent.text == "hello from web.test\n", sent.stderr
            (told,) = [each for each in world.seen() if "skerry-secret-API_TOKEN-" in json.dumps(each)]
            assert told["host"] == "web.test"
            assert "web.test" not in arrived(world, value)
            await manager.destroy(sandbox.id)


async def test_a_snapshot_holds_no_secret(world: World, place: Path, value: str, docker_daemon: Daemon) -> None:
    if not is_usr_merged():
        pytest.skip("the programs of this host are not all below /usr, which these boxes have theirs from")
    image = "skerry-test/secrecy:1"
    settings = {"host": docker_daemon.address, "cache_dir": str(place / "cache")}
    secret = Secret(hosts=(world.rule("api.test", "https"),), env=VARIABLE)
    page = f"https://{world.rule('api.test', 'https')}/hello"
    with installed(place, world, "docker", settings) as config:
        async with AsyncSandboxManager(config) as manager:
            await manager.import_image(host_root(place / "root.tar"), image)
            try:
                sandbox = await manager.create(
                    image=image, mounts=["/usr:/usr:ro"], data=False, secrets={"API_TOKEN": secret}
                )
                used = await sandbox.exec(["python3", "-c", USE, page], stdin=b"")
                assert used.ok, used.stderr
                assert arrived(world, value) == {"api.test": 4}
                await manager.snapshot(sandbox.id, "used")
                folders = [str(docker_daemon.folder), config.state_dir, str(place / "cache")]
                found = [await asyncio.to_thread(in_files, value.encode(), folder) for folder in folders]
                assert found == [[], [], []]
                await manager.remove_snapshot("used")
            finally:
                await manager.destroy_all()
                await manager.remove_image(image, force=True)
