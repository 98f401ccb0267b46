"""Commands of another user, where the provider gives each user an agent of its own; and the shell of a box."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from manager.world import config_of

from skerry.agent.bundle import GUEST
from skerry.errors import InvalidSpec, Unsupported
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.net import dial
from skerry.net.stream import Stream
from skerry.providers.base import Capability
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

from .guest_process import Guest
from .no_boxes import NoBoxes


class WithUsers(NoBoxes):
    """One agent for the box, and for each stream of another user one over stdio, whose commands see $WHO."""

    name = "users"
    capabilities = frozenset({Capability.USERS})

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self.dialled: list[str] = []

    async def dial(self, id: SandboxId) -> Stream:
        return self._guest.stream()

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        self.dialled.append(user)
        if user == "stranger":
            raise InvalidSpec(f"user: there is no {user!r} in the box", field="user")
        env = {"PATH": "/usr/bin:/bin", "WHO": user}
        config = json.dumps({"listen": {"stdio": True}, "home": str(self._guest.home), "env": env})
        return await dial.process([sys.executable, "-I", "-S", "-B", str(GUEST / "start.py"), "id", config])


@pytest.fixture
def provider(guest: Guest) -> WithUsers:
    return WithUsers(guest)


@pytest.fixture
async def shared(provider: WithUsers) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of user `owner` whose provider can be anybody else too."""
    sandbox = AsyncSandbox.of_box(new_id(), Spec(provider="users", user="owner"), provider)
    yield sandbox
    await sandbox.close()


async def test_each_way_to_run_something_is_told_who_runs_it(shared: AsyncSandbox, provider: WithUsers) -> None:
    assert (await shared.exec("echo $WHO", user="app")).stdout == b"app\n"
    assert (await shared.run_code("sh", "echo $WHO", user="app")).stdout == b"app\n"
    process = await shared.start("read line; echo $line $WHO", user="app", stdin=True)
    await process.write("hello\n")
    assert [chunk async for chunk in process] == [(1, b"hello app\n")]
    assert (await process.wait()).exit_code == 0
    assert provider.dialled == ["app"]


async def test_who_the_box_is_anyway_needs_no_agent_of_its_own(shared: AsyncSandbox, provider: WithUsers) -> None:
    assert (await shared.exec("echo $WHO")).stdout == b"\n"
    assert (await shared.exec("echo $WHO", user="owner")).stdout == b"\n"
    assert provider.dialled == []


async def test_many_at_once_share_the_agent_of_their_user(shared: AsyncSandbox, provider: WithUsers) -> None:
    users = ["app", "root", "12:34"] * 5
    results = await asyncio.gather(*(shared.exec("echo $WHO", user=user) for user in users))
    assert [result.text for result in results] == [f"{user}\n" for user in users]
    assert sorted(provider.dialled) == ["12:34", "app", "root"]


async def test_a_closed_sandbox_dials_again(shared: AsyncSandbox, provider: WithUsers) -> None:
    await shared.exec("true", user="app")
    await shared.close()
    assert (await shared.exec("echo $WHO", user="app")).stdout == b"app\n"
    assert provider.dialled == ["app", "app"]


async def test_a_user_that_is_not_there_is_an_error_and_nobody_else_is_taken(shared: AsyncSandbox) -> None:
    with pytest.raises(InvalidSpec, match="stranger"):
        await shared.exec("true", user="stranger")


async def test_an_agent_of_another_user_hears_only_what_the_host_added_to_the_environment(
    shared: AsyncSandbox,
) -> None:
    await shared.set_env({"A": "1", "B": "2"})
    await shared.call("set_env", {"env": {"B": "lie", "LD_PRELOAD": "evil.so"}})
    assert (await shared.exec("echo $A $B $LD_PRELOAD", user="app")).text == "1 2\n"
    await shared.set_env({"B": "3"})
    assert (await shared.exec("echo $A $B $LD_PRELOAD", user="app")).text == "1 3\n"


async def test_what_another_program_added_to_the_environment_is_believed_only_as_it_was(
    provider: WithUsers, tmp_path: Path
) -> None:
    """The agent alone has the values, and may lie: it can hide them, and change none."""
    path = str(tmp_path / "registry.db")

    async def program(stack: AsyncExitStack) -> AsyncSandboxManager:
        store = await Store.open(path)
        stack.push_async_callback(store.aclose)
        return await stack.enter_async_context(
            AsyncSandboxManager(config_of(tmp_path), store=store, providers={"users": provider})
        )

    async with AsyncExitStack() as stack:
        first, second = await program(stack), await program(stack)
        made = await first.create(provider="users", user="owner", env={"A": "1", "B": "2"})
        await made.call("set_env", {"env": {"A": "1", "B": "lie", "LD_PRELOAD": "evil.so"}})  # A as the provider does
        other = await second.get(made.id)
        assert (await other.exec("echo $A $B $LD_PRELOAD", user="app")).text == "1\n"
        await made.set_env({"C": "3"})
        await other.close()
        assert (await other.exec("echo $A $B $C $LD_PRELOAD", user="app")).text == "1 3\n"
        await first.destroy(made.id)
    for file in tmp_path.glob("registry.db*"):
        assert b"evil.so" not in file.read_bytes()


async def test_a_background_process_of_another_user_is_refused(shared: AsyncSandbox, provider: WithUsers) -> None:
    for begin in (shared.start, shared.pty):
        with pytest.raises(Unsupported, match="foreground"):
            await begin(["sleep", "9"], user="app", background=True)
    assert provider.dialled == []
    process = await shared.start(["true"], user="owner", background=True)
    assert (await process.wait()).ok


async def test_a_terminal_of_another_user_has_its_size_is_resized_and_tells_its_exit_code(
    shared: AsyncSandbox,
) -> None:
    process = await shared.pty("echo $WHO; stty size; read x; stty size; exit 7", rows=30, cols=100, user="app")
    seen = b""
    async for _, chunk in process:
        seen += chunk
        if seen.endswith(b"30 100\r\n"):
            await process.resize(41, 123)
            await process.write("\n")
    assert seen.startswith(b"app\r\n30 100\r\n")
    assert seen.endswith(b"41 123\r\n")
    assert (await process.wait()).exit_code == 7


# the shell of a box


async def shell_of(sandbox: AsyncSandbox, **env: str) -> str:
    """The program that a terminal without a command runs."""
    async with await sandbox.pty(env=env) as process:
        await process.write("readlink /proc/$$/exe | tr '[:lower:]' '[:upper:]'; exit\n")
        return "".join([chunk.decode() async for _, chunk in process])


async def test_the_shell_is_the_user_s_own_where_that_is_one(sandbox: AsyncSandbox) -> None:
    for shell, program in (("/bin/dash", "/DASH"), ("/bin/bash", "/BASH")):
        assert program in await shell_of(sandbox, SHELL=shell)


@pytest.mark.parametrize("shell", ["", "/bin/false", "/usr/sbin/nologin", "/nowhere/zsh"])
async def test_a_shell_that_lets_nobody_in_is_not_taken(sandbox: AsyncSandbox, shell: str) -> None:
    assert "/BASH" in await shell_of(sandbox, SHELL=shell)


async def test_without_bash_it_is_sh(sandbox: AsyncSandbox, guest: Guest) -> None:
    for name in ("sh", "readlink", "tr"):
        (guest.home / name).symlink_to(f"/bin/{name}")
    assert "/BASH" not in (seen := await shell_of(sandbox, PATH=str(guest.home)))
    assert "SH\r\n" in seen
