"""The plain dialect both ways: a client of the documents with our agent, and our client with an agent of theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.agent.client import AgentClient, digest_of
from skerry.agent.plain import PlainAgentClient
from skerry.errors import AgentError, CallInterrupted, SkerryError, Unsupported
from skerry.model.results import FileType
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.net import dial
from skerry.net.stream import Stream
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import PATIENCE_S, Guest, wait_until
from .no_boxes import NoBoxes
from .petty import PettyAgent, PettyClient, RpcError

# their client, our agent


def petty_client(guest: Guest) -> PettyClient:
    connection = guest.connect()
    connection.settimeout(PATIENCE_S)
    return PettyClient(connection)


@pytest.fixture
def petty(guest: Guest) -> Iterator[PettyClient]:
    with petty_client(guest) as client:
        yield client


def test_our_agent_answers_all_that_the_documents_name(guest: Guest, petty: PettyClient) -> None:
    assert petty.call("ping") == {"pong": True}
    assert petty.call("exec", cmd="echo out; echo err >&2; exit 3") == {
        "exit_code": 3,
        "stdout": "out\n",
        "stderr": "err\n",
    }
    ran = petty.call("exec_code", lang="python", code="print('é' * 2)")
    assert (ran["exit_code"], ran["stdout"]) == (0, "éé\n")
    path = f"{guest.home}/new/folder/file"
    assert petty.call("write_file", path=path, content="text é\n") == {"success": True}
    assert Path(path).read_text() == "text é\n"
    assert petty.call("read_file", path=path) == {"content": "text é\n"}
    listed = petty.call("list_dir", path=f"{guest.home}/new")
    assert [(each["name"], each["is_dir"]) for each in listed["entries"]] == [("folder", True)]
    assert petty.call("list_dir", path=f"{guest.home}/new/folder") == {
        "entries": [{"name": "file", "is_dir": False, "size": 8}]
    }


def test_a_command_that_is_killed_has_the_code_of_a_shell(petty: PettyClient) -> None:
    assert petty.call("exec", cmd="kill -9 $$")["exit_code"] == 137
    assert petty.call("exec", cmd="exit 255")["exit_code"] == 255


def test_output_beyond_a_mebibyte_is_cut_and_said_to_be(petty: PettyClient) -> None:
    ran = petty.call("exec", cmd="head -c 3000000 /dev/zero; echo end >&2")
    assert ran["truncated"] is True
    assert ran["stdout"].count("\0") >= 1 << 19
    assert len(ran["stdout"]) <= 2 << 20
    assert ran["stderr"] == "end\n"


def test_a_file_of_ten_mebibytes_is_read_and_a_larger_one_refused(guest: Guest, petty: PettyClient) -> None:
    (guest.home / "ten").write_bytes(b"x" * (10 << 20))
    (guest.home / "more").write_bytes(b"x" * ((10 << 20) + 1))
    (guest.home / "bytes").write_bytes(b"\xff\xfe")
    assert len(petty.call("read_file", path="ten")["content"]) == 10 << 20
    for name in ("more", "bytes"):
        with pytest.raises(RpcError):
            petty.call("read_file", path=name)
    assert petty.call("ping") == {"pong": True}


def test_an_empty_file_and_one_of_proc_are_read(guest: Guest, petty: PettyClient) -> None:
    (guest.home / "empty").touch()
    assert petty.call("read_file", path="empty") == {"content": ""}
    assert "MemTotal" in petty.call("read_file", path="/proc/meminfo")["content"]


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("nope", {}, -32601),
        ("stat", {"path": "."}, -32601),
        ("hello", {"protocol": "1"}, -32601),
        ("exec", {}, -32602),
        ("exec", {"cmd": "true", "cwd": "/"}, -32602),
        ("exec", {"cmd": "a\0b"}, -32602),
        ("exec_code", {"lang": "klingon", "code": "x"}, -32602),
        ("read_file", {"path": "missing"}, -32000),
        ("read_file", {"path": "/"}, -32000),
        ("write_file", {"path": "/proc/nothing", "content": "x"}, -32000),
        ("list_dir", {"path": "missing"}, -32000),
        ("exec", {"cmd": "\ud800"}, -32602),
    ],
)
def test_a_refusal_has_a_code_and_the_stream_goes_on(
    petty: PettyClient, method: str, params: dict[str, str], code: int
) -> None:
    petty.call("ping")
    with pytest.raises(RpcError) as refused:
        petty.call(method, **params)
    assert refused.value.code == code
    assert petty.call("exec", cmd="echo on")["stdout"] == "on\n"


def test_requests_that_come_together_are_answered_in_their_order(guest: Guest) -> None:
    lines = [b'{"id":"a","method":"exec","params":{"cmd":"sleep 0.1; echo 1 > f"}}\n']
    lines += [b'{"id":"b","method":"read_file","params":{"path":"f"}}\n', b'{"id":7,"method":"ping"}\n']
    with guest.wire(greet=False) as wire:
        wire.socket.sendall(b"".join(lines))
        answers = [wire.receive()[0] for _ in lines]
    assert [each["id"] for each in answers] == ["a", "b", 7]
    assert answers[1]["result"] == {"content": "1\n"}


def test_a_command_ends_with_the_stream_that_asked_for_it(guest: Guest) -> None:
    with guest.wire(greet=False) as wire:
        wire.send({"id": 1, "method": "exec", "params": {"cmd": "sleep 60"}})
        wait_until(lambda: bool(guest.children()), "the command runs")
    wait_until(lambda: not guest.children(), "the command is gone")


def test_the_full_protocol_goes_on_beside_it(guest: Guest, petty: PettyClient) -> None:
    petty.call("write_file", path="f", content="shared")
    with guest.wire() as wire:
        assert wire.call(1, "stat", path="f")["result"]["size"] == 6


# a token


def test_with_a_token_nothing_is_answered_before_the_right_one() -> None:
    with Guest(token_digest=digest_of("secret")) as guest:
        with petty_client(guest) as petty:
            assert petty.call("auth", token="secret") == {}
            assert petty.call("exec", cmd="echo in")["stdout"] == "in\n"
        for method, params in (
            ("ping", {}),
            ("exec", {"cmd": "touch broken-in"}),
            ("auth", {"token": "guess"}),
            ("auth", {"token": "\ud800"}),
            ("auth", {}),
            ("nope", {}),
        ):
            with petty_client(guest) as stranger, pytest.raises(ConnectionResetError):
                stranger.call(method, **params)
        assert not os.listdir(guest.home)
        with petty_client(guest) as petty:
            petty.call("auth", token="secret")
            with pytest.raises(ConnectionResetError):
                petty.call("auth", token="guess")


async def test_a_stream_that_knows_its_token_is_greeted_with_it() -> None:
    with Guest(token_digest=digest_of("secret")) as guest:
        stream = guest.stream()
        stream.token = "secret"
        client = await AgentClient.greet(stream)
        assert await client.call("ping", type=dict[str, Any]) == {}
        client.close()


def test_an_agent_on_tcp_without_a_token_does_not_start() -> None:
    guest = Guest()
    process = guest.start({"listen": {"tcp": ["127.0.0.1", 0]}, "home": str(guest.home)})
    try:
        assert process.wait(PATIENCE_S) == 1
        assert "token_digest" in guest.log.read_text()
    finally:
        guest.process = process
        guest.__exit__()


# our client, their agent


class PettyProvider(NoBoxes):
    name = "petty"

    def __init__(self, path: str) -> None:
        self._path = path

    async def dial(self, id: SandboxId) -> Stream:
        return await dial.unix(self._path)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[PettyAgent]:
    with PettyAgent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
async def with_theirs(theirs: PettyAgent) -> AsyncIterator[AsyncSandbox]:
    """A sandbox whose agent is theirs."""
    made = AsyncSandbox.of_box(new_id(), Spec(provider="petty"), PettyProvider(theirs.path))
    yield made
    await made.close()


async def test_a_sandbox_works_on_an_agent_that_knows_no_greeting(with_theirs: AsyncSandbox, tmp_path: Path) -> None:
    ran = await with_theirs.exec("echo out; echo err >&2; exit 3")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, b"out\n", b"err\n")
    assert (await with_theirs.run_code("python", "print(6 * 7)")).text == "42\n"
    folder = tmp_path / "made"
    assert await with_theirs.files.write(folder / "file", "text é") == 7
    assert await with_theirs.files.read_text(folder / "file") == "text é"
    assert b"".join([piece async for piece in with_theirs.files.iter_chunks(folder / "file")]) == "text é".encode()
    (found,) = await with_theirs.files.list(folder)
    assert (found.name, found.path, found.type, found.size) == ("file", f"{folder}/file", FileType.FILE, 7)
    (above,) = [each for each in await with_theirs.files.list(tmp_path) if each.name == "made"]
    assert above.type is FileType.DIR


async def test_what_their_agent_has_no_words_for_is_refused(with_theirs: AsyncSandbox) -> None:
    for asked in (
        with_theirs.exec(["ls", "-l"]),
        with_theirs.exec("ls", env={"A": "b"}),
        with_theirs.exec("ls", cwd="/"),
        with_theirs.exec("cat", stdin="x"),
        with_theirs.files.append("f", "x"),
        with_theirs.files.write("f", "x", mode=0o600),
        with_theirs.files.write("f", b"\xff"),
        with_theirs.files.list(".", depth=2),
        with_theirs.files.stat("f"),
        with_theirs.metrics(),
    ):
        with pytest.raises(Unsupported, match="plain dialect"):
            await asked
    assert (await with_theirs.exec("echo on")).text == "on\n"


async def test_their_errors_keep_their_codes(with_theirs: AsyncSandbox, theirs: PettyAgent) -> None:
    with pytest.raises(AgentError, match="No such file") as failed:
        await with_theirs.files.read("/nowhere")
    assert failed.value.rpc_code == -32603
    assert (await with_theirs.exec("echo on")).text == "on\n"


async def test_our_own_errors_have_codes_too(guest: Guest) -> None:
    client = await guest.client()
    for method, code in (("nope", -32601), ("read_file", -32000)):
        with pytest.raises(SkerryError) as failed:
            await client.call(method, {"path": "missing"}, type=dict[str, Any])
        assert failed.value.rpc_code == code
    client.close()


async def test_a_command_whose_time_is_over_is_told_of_and_the_next_one_runs(with_theirs: AsyncSandbox) -> None:
    ran = await with_theirs.exec("exec sleep 2", timeout_s=0.05)
    assert (ran.exit_code, ran.timed_out) == (124, True)
    assert (await with_theirs.exec("echo on")).text == "on\n"


async def test_a_call_that_is_given_up_hangs_up(theirs: PettyAgent) -> None:
    client = await AgentClient.greet(await dial.unix(theirs.path))
    assert isinstance(client, PlainAgentClient)
    call = client.open("exec", {"shell": "sleep 1"})
    call.abandon()
    assert not client.is_open
    with pytest.raises(CallInterrupted):
        client.open("ping")


async def test_a_write_that_is_given_up_before_its_end_is_never_sent(theirs: PettyAgent, tmp_path: Path) -> None:
    client = await AgentClient.greet(await dial.unix(theirs.path))
    call = client.open("write_file", {"path": str(tmp_path / "never")})
    await call.send(b"half of it")
    call.abandon()
    assert await client.call("ping", type=dict[str, Any]) == {}
    assert not (tmp_path / "never").exists()
    client.close()


async def test_a_stream_that_was_given_away_is_greeted_anew(theirs: PettyAgent) -> None:
    client = await AgentClient.greet(await dial.unix(theirs.path))
    again = await AgentClient.greet(client.release())
    assert isinstance(again, PlainAgentClient)
    assert await again.call("ping", type=dict[str, Any]) == {}
    again.close()


async def test_more_than_a_line_holds_is_refused_and_nothing_of_it_written(
    with_theirs: AsyncSandbox, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match="bytes"):
        await with_theirs.files.write(tmp_path / "large", b"x" * (17 << 20))
    assert not (tmp_path / "large").exists()
    assert (await with_theirs.exec("echo on")).text == "on\n"


async def test_a_file_of_several_mebibytes_goes_both_ways(with_theirs: AsyncSandbox, tmp_path: Path) -> None:
    content = b"0123456789abcdef" * (5 << 16)
    assert await with_theirs.files.write(tmp_path / "large", content) == len(content)
    assert await with_theirs.files.read(tmp_path / "large") == content


def test_the_two_of_theirs_work_with_each_other(theirs: PettyAgent) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(theirs.path)
        with PettyClient(connection) as client:
            assert client.call("exec", cmd="echo hi")["stdout"] == "hi\n"
