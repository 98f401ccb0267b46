"""The first process of a machine: what the host tells it, and what its user gets to see."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from skerry.agent.bundle import GUEST, Portable
from skerry.agent.client import digest_of

from .first_process import FirstProcess, build_runtime, preparation, why_not
from .guest_process import PATIENCE_S, Wire

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SEED = {"entropy": "5a" * 64, "hostname": "a-box", "machine_id": "0123456789abcdef" * 2}
OF_ROOT = 0xA00004FB
"""Over files, users and processes, and to listen on low ports."""


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Portable:
    return build_runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def machine(portable: Portable) -> Iterator[FirstProcess]:
    with FirstProcess(portable) as running:
        yield running


def run(wire: Wire, script: str, id: int = 100) -> tuple[int, str]:
    """The exit code and the output of a shell script."""
    wire.send({"id": id, "method": "exec", "params": {"shell": script}})
    output = b""
    while True:
        message, attachment = wire.receive()
        assert message, "the agent closed the stream"
        output += attachment
        if message.get("id") == id:
            assert "result" in message, message
            return message["result"]["exit_code"], output.decode()


def prepare(machine: FirstProcess, **changes: Any) -> tuple[Wire, Wire]:
    """The control stream and the user's, of a machine that is prepared."""
    control = machine.wire(51)
    assert "result" in control.call(1, "reseed", **SEED)
    answer = control.call(2, "prepare", **preparation(**changes))
    assert "result" in answer, (answer, machine.words())
    return control, machine.wire(52)


def test_the_user_has_no_privilege_and_a_root_without_the_first_process(machine: FirstProcess) -> None:
    control, user = prepare(machine)
    with control, user:
        code, said = run(user, "id -u; id -g; id -G; pwd; cat /proc/self/status")
        assert code == 0
        assert said.splitlines()[:4] == ["1000", "1000", "1000", "/home/user"]
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{name}:\t{0:016x}" in said
        assert "NoNewPrivs:\t1" in said
        devices = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
        assert run(user, "ls /run; echo $(ls /dev); cat /proc/1/comm")[1].splitlines() == [devices, "ld.so"]
        assert run(user, "cat /proc/1/environ || echo x >/proc/sys/kernel/core_pattern")[0] != 0
        assert run(user, "echo mine >~/file && cat ~/file")[1] == "mine\n"


def test_what_the_first_command_needs_is_loaded_before_there_is_a_user(portable: Portable) -> None:
    agent = portable.folder.parent / "agent"
    with FirstProcess(portable) as machine, machine.wire(51) as control:
        assert "result" in control.call(1, "prepare", **preparation())
        hidden = agent.rename(agent.with_name("hidden"))
        try:
            with machine.wire(52) as user:
                assert run(user, "echo ready") == (0, "ready\n")
        finally:
            hidden.rename(agent)


def test_a_machine_is_named_anew_by_each_reseed(machine: FirstProcess) -> None:
    control, user = prepare(machine)
    with control, user:
        assert run(user, "hostname; cat /etc/hostname /etc/machine-id")[1].split() == [
            "a-box",
            "a-box",
            SEED["machine_id"],
        ]
        assert "result" in control.call(3, "reseed", **{**SEED, "hostname": "another"})
        assert run(user, "hostname; cat /etc/hostname")[1].split() == ["another", "another"]


def test_a_network_without_an_address_is_loopback_with_ports_for_all_and_a_resolver(machine: FirstProcess) -> None:
    control, user = prepare(machine, network={"nameserver": "127.0.0.1"})
    with control, user:
        setting = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
        assert run(user, f"cat {setting} /etc/resolv.conf; cat /proc/net/route | wc -l")[1].splitlines() == [
            "0",
            "nameserver 127.0.0.1",
            "1",
        ]
        assert run(user, f"echo 1024 >{setting}")[0] != 0


@pytest.mark.parametrize(
    "wrong",
    [{"entropy": "xyz"}, {"machine_id": "short"}, {"hostname": ""}, {"hostname": "two\nlines"}, {"machine_id": 5}],
)
def test_a_wrong_seed_is_refused(machine: FirstProcess, wrong: dict[str, Any]) -> None:
    with machine.wire(51) as control:
        assert control.call(1, "reseed", **{**SEED, **wrong})["error"]["data"]["kind"] == "invalid"


def test_before_it_is_prepared_nothing_of_the_user_can_be_reached(machine: FirstProcess) -> None:
    with machine.wire(51) as control:
        assert control.call(1, "agent_as", user="root")["error"]["data"]["kind"] == "invalid"
        for port in (52, 53, 60000):
            with pytest.raises(ConnectionRefusedError):
                machine.connect(port)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"home": "relative"}, "invalid"), ({"cwd": None}, "invalid"), ({"user": "nobody-knows"}, "no_user")],
)
def test_a_wrong_preparation_is_explained_and_the_machine_stays_to_tell_it(
    machine: FirstProcess, wrong: dict[str, Any], kind: str
) -> None:
    with machine.wire(51) as control:
        control.call(1, "reseed", **SEED)
        assert control.call(2, "prepare", **preparation(**wrong))["error"]["data"]["kind"] == kind
        assert "result" in control.call(3, "ping")


def test_a_machine_is_prepared_once(machine: FirstProcess) -> None:
    control, user = prepare(machine)
    with control, user:
        assert control.call(3, "prepare", **preparation())["error"]["data"]["kind"] == "exists"


@pytest.mark.parametrize(("user", "uid", "gid"), [("root", "0", "0"), ("user", "1000", "1000"), ("12:13", "12", "13")])
def test_an_agent_of_another_user_serves_one_stream(machine: FirstProcess, user: str, uid: str, gid: str) -> None:
    control, first = prepare(machine)
    with control, first:
        port = control.call(3, "agent_as", user=user)["result"]["port"]
        with machine.wire(port) as other:
            script = "id -u; id -g; grep CapEff /proc/self/status; kill -9 1; ls /run"
            capabilities = OF_ROOT if user == "root" else 0
            assert run(other, script)[1].split()[:4] == [uid, gid, "CapEff:", f"{capabilities:016x}"]
        with machine.wire(51) as again:
            again.call(1, "ping")
        assert run(first, "echo alive")[1] == "alive\n"
        assert control.call(4, "agent_as", user="nobody-knows")["error"]["data"]["kind"] == "no_user"


def test_a_port_may_lead_to_a_socket_of_a_service(machine: FirstProcess) -> None:
    script = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/run/s'); s.listen()\n"
    script += "while True:\n c = s.accept()[0]; data = c.makefile('rb').read(); c.sendall(data[::-1]); c.close()\n"
    code = base64.b64encode(script.encode()).decode()
    service = [
        "sh",
        "-c",
        f"echo {code} | base64 -d >/run/code; echo a service speaks; exec python3 -I -S -B /run/code",
    ]
    control, user = prepare(machine, services=[service], forwards={"2375": "/run/s"})
    with control, user:
        while run(control, "test -S /run/s")[0]:
            pass
        with machine.connect(2375) as stream:
            stream.sendall(b"abc" * 50_000)
            stream.shutdown(socket.SHUT_WR)
            received = b""
            while part := stream.recv(1 << 16):
                received += part
            assert received == b"cba" * 50_000
        assert run(user, "ls /run/s")[0] != 0
    assert "a service speaks" in machine.words()


def test_the_machine_ends_with_the_agent_of_its_user(machine: FirstProcess) -> None:
    control, user = prepare(machine, services=[["sh", "-c", "sleep 1000"]])
    with control, user:
        assert "result" in user.call(3, "shutdown")
        machine.process.wait(PATIENCE_S)
    assert "this box has ended by itself" in machine.words()
    assert "service sh ended with" in machine.words()


def test_shutdown_lets_the_users_processes_end(machine: FirstProcess) -> None:
    control, user = prepare(machine)
    with control, user:
        script = "trap 'echo ending; read line; exit' TERM; echo up; while :; do read line; done"
        user.send({"id": 7, "method": "exec", "params": {"shell": script, "stdin": True}})
        assert user.receive()[1] == b"up\n"
        assert "result" in control.call(8, "shutdown", grace_s=60)
        assert user.receive()[1] == b"ending\n"
        user.send({"method": "data", "params": {"id": 7}}, b"go\n")
        machine.process.wait(PATIENCE_S)


def test_a_lifetime_of_the_first_process_ends_the_machine(machine: FirstProcess) -> None:
    control, user = prepare(machine)
    with control, user:
        assert control.call(3, "set_lifetime", lifetime_s=0.05)["result"]["lifetime_s"] <= 0.05
        machine.process.wait(PATIENCE_S)


def test_nothing_but_a_first_process_runs_it() -> None:
    argv = [sys.executable, "-I", "-S", "-B", str(GUEST / "machine.py"), "skerry.channel=fd:0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "first process" in done.stderr


# a token


def test_a_machine_that_was_told_of_a_token_hears_nobody_without_it(portable: Portable) -> None:
    shared, own = "of all clones", "of this machine alone"
    with FirstProcess(portable, f"skerry.token={digest_of(shared)}") as machine:
        for first in ({"method": "hello", "params": {"protocol": 1}}, {"method": "exec", "params": {"cmd": "true"}}):
            with Wire(machine.connect(51), greet=False) as stranger:
                stranger.send({"id": 1, **first})
                assert stranger.receive() == ({}, b"")
        with token_wire(machine, 51, shared) as control:
            refused = control.call(1, "prepare", **preparation(token_digest=digest_of(own), forwards={"99": "/x"}))
            assert refused["error"]["data"]["kind"] == "invalid"
            assert "result" in control.call(2, "reseed", **SEED)
            assert "result" in control.call(3, "prepare", **preparation(token_digest=digest_of(own)))
            port = control.call(4, "agent_as", user="root")["result"]["port"]
        for reached in (51, 52):
            with Wire(machine.connect(reached), greet=False) as stranger:
                stranger.send({"id": 0, "method": "hello", "params": {"protocol": 1, "token": shared}})
                assert stranger.receive() == ({}, b"")
        for reached in (51, 52, port):
            with token_wire(machine, reached, own) as wire:
                assert wire.call(1, "ping")["result"] == {}


def token_wire(machine: FirstProcess, port: int, token: str) -> Wire:
    wire = Wire(machine.connect(port), greet=False)
    wire.send({"id": 0, "method": "hello", "params": {"protocol": 1, "token": token}})
    assert wire.answer(0)["result"]["protocol"] == 1
    return wire
