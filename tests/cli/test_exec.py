from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from .conftest import PROGRAM, Run

pytestmark = pytest.mark.usefixtures("box")
BOTH_WAYS = pytest.mark.parametrize("skerry", ["alone", "forked"], indirect=True)


def start_in_background(skerry: Run, script: str, *options: str) -> int:
    done = skerry("exec", "-d", *options, "box", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def wait_for_logs(skerry: Run, text: bytes) -> None:
    deadline = time.monotonic() + 20
    while text not in skerry("logs", "box").stdout:
        assert time.monotonic() < deadline


@BOTH_WAYS
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("box", "true"), 0),
        (("box", "--", "sh", "-c", "exit 42"), 42),
        (("box", "sh", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
        (("box", "no-such-program"), 127),
        (("box", "/etc/passwd"), 126),
        (("--timeout", "0.5", "box", "sleep", "60"), 124),
        (("--timeout", "soon", "box", "true"), 125),
        (("box",), 125),
        (("-t", "box", "true"), 125),
    ],
)
def test_the_exit_code_tells_whose_failure_it_was(skerry: Run, command: tuple[str, ...], code: int) -> None:
    done = skerry("exec", *command)
    assert done.returncode == code, done.stderr
    assert code not in (125, 126, 127) or done.stderr


@BOTH_WAYS
def test_options_end_at_the_sandbox(skerry: Run) -> None:
    assert skerry("exec", "box", "printf", "%s|", "-t", "--json", "--", "").stdout == b"-t|--json|--||"
    assert skerry("exec", "box", "--", "printf", "%s|", "--", "-e").stdout == b"--|-e|"


@BOTH_WAYS
def test_input_and_output_are_exact(skerry: Run) -> None:
    data = os.urandom(3_000_000)
    assert skerry("exec", "-i", "box", "cat", input=data).stdout == data
    assert skerry("exec", "box", "cat", input=b"secret").stdout == b""
    done = skerry("exec", "box", "sh", "-c", r"printf '\377'; printf 'e' >&2")
    assert (done.stdout, done.stderr) == (b"\xff", b"e")


@BOTH_WAYS
def test_variables_and_folder_are_the_commands_own(skerry: Run) -> None:
    script = 'echo "$A,$MINE,$PWD"'
    done = skerry("exec", "-e", "A=1", "-e", "MINE", "-w", "/tmp", "box", "sh", "-c", script, env={"MINE": "here"})
    assert done.stdout == b"1,here,/tmp\n"


@BOTH_WAYS
def test_json_is_one_object_that_tells_all(skerry: Run, box: str) -> None:
    told = json.loads(skerry("exec", "--json", "box", "sh", "-c", "echo out; echo err >&2; exit 3").stdout)
    assert (told["sandbox"], told["exit_code"], told["stdout"], told["stderr"]) == (box, 3, "out\n", "err\n")


def test_the_sandbox_stays_when_the_command_is_interrupted(skerry: Run) -> None:
    command = [*PROGRAM, "exec", "box", "sh", "-c", "echo up; sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while json.loads(skerry("top", "box", "--json").stdout):  # the command dies with its stream
        assert time.monotonic() < deadline


def test_a_background_process_lives_on_and_is_listed(skerry: Run, box: str) -> None:
    number = start_in_background(skerry, "echo one; echo two >&2; sleep 60")
    told = json.loads(skerry("exec", "-d", "--json", "box", "sh", "-c", "exit 5").stdout)
    assert told == {"sandbox": box, "process": number + 1}
    header, first, second = skerry("top", "box").stdout.decode().splitlines()
    assert header.split() == ["PROCESS", "PID", "STATE", "AGE", "KIND", "TAG", "COMMAND"]
    assert first.split()[0] == str(number)
    assert "running" in first
    assert first.endswith("sh -c 'echo one; echo two >&2; sleep 60'")
    assert "exit 5" in second
    assert json.loads(skerry("top", "box", "--json").stdout)[0]["running"]


def test_logs_are_what_a_background_process_said_on_each_stream(skerry: Run) -> None:
    number = start_in_background(skerry, "echo one; echo two >&2; sleep 60")
    wait_for_logs(skerry, b"one\n")
    done = skerry("logs", "box", str(number))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\n", b"two\n")
    told = json.loads(skerry("logs", "--json", "box").stdout)
    assert told == [{"process": number, "stdout": "one\n", "stderr": "two\n"}]


def test_logs_of_several_bear_their_numbers(skerry: Run) -> None:
    first = start_in_background(skerry, "printf 'a\\nb'")
    second = start_in_background(skerry, "echo c")
    wait_for_logs(skerry, b"c\n")
    assert skerry("logs", "box").stdout.decode() == f"{first} | a\n{first} | b\n{second} | c\n"
    assert skerry("logs", "box", str(first)).stdout == b"a\nb"


def test_logs_keep_the_last_mebibyte(skerry: Run) -> None:
    number = start_in_background(skerry, "head -c 3000000 /dev/zero; echo end")
    wait_for_logs(skerry, b"end\n")
    kept = skerry("logs", "box", str(number)).stdout
    assert 500_000 < len(kept) <= 1 << 20


def test_logs_are_followed_to_the_end(skerry: Run) -> None:
    start_in_background(skerry, "echo one; sleep 0.5; echo two")
    assert skerry("logs", "-f", "box").stdout == b"one\ntwo\n"


def test_logs_without_a_process_are_empty(skerry: Run) -> None:
    assert skerry("logs", "box").stdout == b""
    assert skerry("logs", "box", "99").returncode == 125


def test_attach_gives_what_was_said_then_what_is_said_and_the_exit_code(skerry: Run) -> None:
    number = start_in_background(skerry, "echo one; read line; echo got $line; exit 7", "-i")
    wait_for_logs(skerry, b"one\n")
    done = skerry("attach", "-i", "box", str(number), input=b"word\n")
    assert (done.returncode, done.stdout) == (7, b"one\ngot word\n")


def test_leaving_an_attached_process_does_not_end_it(skerry: Run) -> None:
    number = start_in_background(skerry, "echo one; sleep 60")
    with subprocess.Popen([*PROGRAM, "attach", "box", str(number)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"one\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert json.loads(skerry("top", "box", "--json").stdout)[0]["running"]


def test_a_shell_is_that_of_the_user_who_was_asked_for(skerry: Run) -> None:
    assert skerry("attach", "-u", "user", "box", input=b"id -un\n").stdout == b"user\n"
    refused = skerry("attach", "-u", "root", "box", input=b"id -un\n")
    assert (refused.returncode, refused.stdout) == (125, b"")
    assert b"it cannot become 'root'" in refused.stderr
    assert skerry("attach", "-u", "user", "box", "1").returncode == 125


def test_attach_without_a_process_is_a_shell(skerry: Run) -> None:
    done = skerry("attach", "box", input=b"echo $((40+2)); exit 4\n")
    assert (done.returncode, done.stdout) == (4, b"42\n")


def test_kill_ends_a_process_or_all(skerry: Run) -> None:
    script = "trap 'echo caught; exit 3' TERM; echo up; while :; do sleep 0.1; done"
    first, second, third = (start_in_background(skerry, script) for _ in range(3))
    for number in (first, second, third):
        wait_for_logs(skerry, f"{number} | up".encode())
    done = skerry("kill", "-s", "term", "box", str(first))
    assert (done.returncode, done.stdout.decode()) == (0, f"{first}\n")
    assert skerry("attach", "box", str(first)).returncode == 3
    assert skerry("kill", "box").stdout.decode() == f"{second}\n{third}\n"
    assert skerry("attach", "box", str(third)).returncode == 128 + signal.SIGKILL
    assert skerry("kill", "box", "99").returncode == 125
    assert b"no signal" in skerry("kill", "-s", "loud", "box").stderr
    assert json.loads(skerry("kill", "--json", "box").stdout) == []


def test_stats_are_a_table_or_a_line_for_each(skerry: Run, box: str) -> None:
    header, row, host = skerry("stats", "--no-stream").stdout.decode().splitlines()
    assert re.match(r"host  \S+ of \S+ memory free, 1G promised of any amount; .* of disk free$", host)
    assert header.split() == ["ID", "NAME", "CPU", "MEMORY", "DISK", "PROCESSES", "UPTIME"]
    assert row.split()[:2] == [box[:12], "box"]
    done = skerry("stats", "--no-stream", "--json", "box", "nonsense")
    used, failed = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 125
    assert (used["id"], used["name"]) == (box, "box")
    assert used["memory_bytes"] > 0
    assert failed["error"]["code"] == "not_found"


LYING = """
import os, re, sys
from skerry import cli
from skerry.agent import client
number = sys.argv[1].encode()
real = client.AgentClient._read_line

def read_line(self, data, at):
    line = bytes(data[at:])
    if b"memory_bytes" in line and self is first(self):
        lie = re.sub(rb'("memory_bytes": ?)\\d+', rb"\\g<1>" + number, line)
        real(self, memoryview(lie), 0)
        return len(data)
    return real(self, data, at)

found = []
def first(self):
    found.append(self)
    return found[0]

client.AgentClient._read_line = read_line
sys.exit(cli.invoke(sys.argv[2:]))
"""


def test_a_sandbox_that_reports_a_number_of_400_digits_spoils_its_own_row_only(skerry: Run, box: str) -> None:
    other = skerry("create").stdout.decode().strip()
    try:
        command = [sys.executable, "-c", LYING, "9" * 400, "stats", "--no-stream"]
        done = subprocess.run(command, capture_output=True, timeout=60)
        rows = done.stdout.decode().splitlines()[1:-1]  # without the header, and the line of the host
        assert sorted("broke the protocol" in row for row in rows) == [False, True]
        assert b"Traceback" not in done.stderr
        assert b"internal" not in done.stderr
        assert done.returncode == 125
    finally:
        assert skerry("rm", "-f", other).returncode == 0


MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
"""In between, as a process begins with the mark of whoever forked it."""


def test_json_of_output_that_is_all_escapes_takes_little_memory() -> None:
    command = [*PROGRAM, "exec", "--json", "box", "head", "-c", "100000000", "/dev/zero"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, timeout=60)
    code, used_kib = map(int, done.stderr.split())
    assert (code, done.stdout.count(b"\\u0000")) == (0, 16 << 20)
    assert used_kib < 192 << 10


def test_stats_go_on_until_the_sandbox_has_ended(skerry: Run) -> None:
    command = [*PROGRAM, "stats", "--json", "box"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert second["uptime_s"] > first["uptime_s"]
        assert skerry("rm", "box").returncode == 0
        assert process.wait(20) == 125
