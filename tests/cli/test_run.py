from __future__ import annotations

import base64
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from .conftest import DESTROY, PROGRAM, Run, ids

pytestmark = pytest.mark.usefixtures("boxes")


def start(*args: str, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PROGRAM, "run", *args], **{"stdin": subprocess.DEVNULL, **streams})


def test_options_end_at_the_first_word_that_is_none(skerry: Run) -> None:
    assert skerry("run", "printf", "%s|", "-t", "--json", "a b", "").stdout == b"-t|--json|a b||"
    assert skerry("run", "-e", "A=1", "--", "printf", "%s|", "--", "-e").stdout == b"--|-e|"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 42"), 42),
        (("sh", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
        (("no-such-program",), 127),
        (("/etc/passwd",), 126),
        (("--timeout", "0.5", "sleep", "60"), 124),
        (("--memory", "1", "true"), 125),
        (("--provider", "nonsense", "true"), 125),
        (("--user", "Not A User", "true"), 125),
        (("--label", "x", "true"), 125),
        (("-v", "nonsense", "true"), 125),
        (("--timeout", "soon", "true"), 125),
    ],
)
def test_the_exit_code_tells_whose_failure_it_was(skerry: Run, command: tuple[str, ...], code: int) -> None:
    done = skerry("run", *command)
    assert done.returncode == code, done.stderr
    assert code not in (125, 126, 127) or done.stderr


def test_a_program_that_may_open_few_files_takes_what_it_can_get_and_its_box_has_its_own_limit() -> None:
    few = ["sh", "-c", 'ulimit -Sn 64 && exec "$@"', "sh", *PROGRAM]
    command = [*few, "run", "sh", "-c", "ulimit -Sn; ulimit -Hn; cat"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert [int(running.stdout.readline()) for _ in range(2)] == [1024, 1024]
        most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
        assert resource.prlimit(running.pid, resource.RLIMIT_NOFILE) == (most, hard)
        running.stdin.close()
        assert running.wait(30) == 0


def test_output_is_exact_and_on_its_own_stream(skerry: Run) -> None:
    done = skerry("run", "sh", "-c", r"printf '\000\377\r\n'; printf 'e\200' >&2")
    assert (done.stdout, done.stderr) == (b"\x00\xff\r\n", b"e\x80")


def test_a_large_output_comes_whole(skerry: Run) -> None:
    assert skerry("run", "head", "-c", "20000000", "/dev/zero").stdout == bytes(20_000_000)


def test_output_is_live() -> None:
    with start("-i", "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word
        process.stdin.close()
        assert process.wait(20) == 0


def test_stdin_is_passed_on_only_when_asked(skerry: Run) -> None:
    data = os.urandom(3_000_000)
    assert skerry("run", "-i", "cat", input=data).stdout == data
    assert skerry("run", "cat", input=b"secret").stdout == b""


def test_a_command_that_ends_without_reading_its_input_ends_the_run(skerry: Run) -> None:
    with start("-i", "true", stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 0


def test_variables_come_by_value_and_by_name(skerry: Run) -> None:
    env = {"MINE": "from here", "SECRET": "x"}
    done = skerry(
        "run", "-e", "A=1=2", "-e", "MINE", "-e", "UNSET", "sh", "-c", 'echo "$A,$MINE,${UNSET-none},$SECRET"', env=env
    )
    assert done.stdout == b"1=2,from here,none,\n"


def test_folder_and_mount_are_given_to_the_box(skerry: Run) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "file").write_text("of the host")
        done = skerry("run", "-v", f"{folder}:/data:ro", "-w", "/data", "cat", "file")
        assert done.stdout == b"of the host", done.stderr
        assert skerry("run", "-v", f"{folder}:/data:ro", "touch", "/data/new").returncode != 0


def test_json_is_one_object_that_tells_all(skerry: Run) -> None:
    done = skerry("run", "--json", "sh", "-c", r"printf 'a\377'; echo e >&2; exit 3")
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 3
    assert base64.b64decode(told["stdout_base64"]) == b"a\xff"
    assert told["stderr"] == "e\n"
    assert "stderr_base64" not in told
    assert (told["timed_out"], told["truncated"], told["signal"]) == (False, False, None)
    assert told["sandbox"].count("-") == 4
    assert all(how.keys() == {"by", "why_not"} for how in told["enforced"].values())
    assert 0 < told["duration_s"] < 20


def test_json_of_a_timeout_has_the_output_so_far(skerry: Run) -> None:
    told = json.loads(skerry("run", "--json", "--timeout", "1s", "sh", "-c", "echo so far; sleep 60").stdout)
    assert (told["exit_code"], told["timed_out"], told["stdout"]) == (124, True, "so far\n")


def test_json_takes_input_too(skerry: Run) -> None:
    assert json.loads(skerry("run", "--json", "-i", "cat", input=b"in").stdout)["stdout"] == "in"


def test_keep_leaves_the_sandbox_and_tells_its_id(skerry: Run, boxes: Path) -> None:
    done = skerry("run", "--keep", "true")
    (id,) = ids(boxes)
    assert done.returncode == 0
    assert done.stdout == b""
    assert id in done.stderr.decode()
    subprocess.run([PROGRAM[0], "-c", DESTROY, str(boxes), id], check=True)


def test_the_host_network_is_warned_of(skerry: Run) -> None:
    done = skerry("run", "--network", "host", "true")
    assert done.returncode == 0
    assert b"warning" in done.stderr


def test_nothing_but_the_command_speaks_when_all_is_well(skerry: Run) -> None:
    done = skerry("run", "echo", "hi")
    assert (done.stdout, done.stderr) == (b"hi\n", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_and_takes_the_sandbox_with_it(number: int, boxes: Path) -> None:
    with start("tail", "-f", "/etc/passwd", stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"root:")
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    assert ids(boxes) == []


def test_the_first_interrupt_is_the_commands_own(boxes: Path) -> None:
    script = "trap 'echo caught; exit 9' INT; echo up; while :; do sleep 0.1; done"
    with start("sh", "-c", script, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"caught\n"
        assert process.wait(20) == 9


def test_the_second_interrupt_ends_a_command_that_ignores_the_first(boxes: Path) -> None:
    script = "trap 'echo caught' INT; echo up; while :; do sleep 0.1; done"
    with start("sh", "-c", script, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"caught\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert ids(boxes) == []


@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.3, 0.5])
def test_an_interrupt_at_any_moment_leaves_nothing(delay_s: float, boxes: Path) -> None:
    with start("sleep", "60", stderr=subprocess.DEVNULL) as process:
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (128 + signal.SIGTERM, -signal.SIGTERM)  # the latter before there was a sandbox
    assert ids(boxes) == []


def test_a_reader_that_goes_away_ends_the_run_quietly(boxes: Path) -> None:
    with start("yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(20) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""
    assert ids(boxes) == []


def test_a_reader_that_never_reads_does_not_keep_us_from_ending(boxes: Path) -> None:
    with start("sh", "-c", "echo up >&2; yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert process.stderr.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_it_runs_in_memory_too(skerry: Run) -> None:
    done = skerry("run", "--provider", "mock", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, b"hi\n"), done.stderr


def test_a_sandbox_whose_time_is_over_says_so(skerry: Run) -> None:
    done = skerry("run", "--lifetime", "1", "--", "sleep", "60")
    assert done.returncode == 125
    assert b"the sandbox ended before its command did: lifetime" in done.stderr
