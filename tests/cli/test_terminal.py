from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import DESTROY, PROGRAM, ids
from .screen import Screen

pytestmark = pytest.mark.usefixtures("boxes")


@pytest.fixture
def shell(open_screen: Callable[..., Screen]) -> Screen:
    screen = open_screen("run", "-it", "-e", "PS1=> ", "--", "bash", "--norc")
    screen.wait_for("> ")
    return screen


def test_the_window_has_its_size_from_the_start(shell: Screen) -> None:
    shell.type("stty size\r")
    shell.wait_for("30 100\r\n")


def test_a_resize_reaches_the_box(shell: Screen) -> None:
    shell.type("until [ \"$(stty size)\" = '41 123' ]; do :; done; echo re''sized\r")
    shell.resize(41, 123)
    shell.wait_for("resized\r\n")


def test_ctrl_c_is_for_what_runs_in_the_shell(shell: Screen) -> None:
    shell.type("sh -c \"echo go''es; exec sleep 60\"\r")
    shell.wait_for("goes\r\n")
    shell.type("\x03")
    shell.wait_for("> ")
    shell.type("echo code-$?\r")
    shell.wait_for("code-130")
    assert shell.process.poll() is None


def test_ctrl_z_and_job_control_work_inside(shell: Screen) -> None:
    shell.type("echo go''es; cat\r")
    shell.wait_for("goes\r\n")
    shell.type("ping\r")
    shell.wait_for("ping\r\nping\r\n")
    shell.type("\x1a")
    shell.wait_for("Stopped")
    shell.wait_for("> ")
    shell.type("fg\r")
    shell.wait_for("cat\r\n")
    shell.type("pong\r")
    shell.wait_for("pong\r\npong\r\n")
    shell.type("\x04")
    shell.wait_for("> ")
    shell.type("exit 7\r")
    assert shell.wait() == 7


def test_ctrl_d_ends_the_shell_and_the_terminal_is_as_before(shell: Screen) -> None:
    assert shell.is_raw()
    shell.type("\x04")
    assert shell.wait() == 0
    assert shell.mode() == shell.mode_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_as_before_after_a_signal(shell: Screen, number: int, boxes: Path) -> None:
    assert shell.is_raw()
    shell.process.send_signal(number)
    assert shell.wait() == 128 + number
    assert shell.mode() == shell.mode_before
    assert ids(boxes) == []


def test_the_terminal_is_as_before_when_the_box_is_lost(shell: Screen, boxes: Path) -> None:
    (id,) = ids(boxes)
    subprocess.run([PROGRAM[0], "-c", DESTROY, str(boxes), id], check=True)
    assert shell.wait() == 125
    assert shell.mode() == shell.mode_before
    assert b"skerry:" in shell.seen


def test_the_terminal_is_as_before_after_a_command_that_does_not_exist(open_screen: Callable[..., Screen]) -> None:
    screen = open_screen("run", "-it", "no-such-program")
    assert screen.wait() == 127
    assert screen.mode() == screen.mode_before


def test_the_closing_of_the_window_ends_all(shell: Screen, boxes: Path) -> None:
    os.close(shell.keyboard)
    shell.process.wait(20)
    shell.keyboard = os.open(os.devnull, os.O_RDWR)
    assert ids(boxes) == []


def test_the_kind_of_terminal_is_told(open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    screen = open_screen("run", "-t", "sh", "-c", 'echo "$TERM $COLORTERM"; tty')
    screen.wait_for("xterm-256color truecolor\r\n")
    screen.wait_for("/dev/pts/")
    assert screen.wait() == 0


def test_without_a_command_it_is_the_shell_of_the_box(open_screen: Callable[..., Screen]) -> None:
    screen = open_screen("run", "-it")
    screen.type("echo $((40+2)); exit 3\r")
    screen.wait_for("42")
    assert screen.wait() == 3


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed")
def test_a_box_without_a_shell_says_so(open_screen: Callable[..., Screen], boxes: Path) -> None:
    root = boxes / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    screen = open_screen("run", "-it", "--root", str(root))
    screen.wait_for("this box has no shell, /bin/sh is missing")
    assert screen.wait() == 125
    screen = open_screen("run", "-it", "--root", str(root), "--", "busybox", "sh", "-c", "exit 5")
    assert screen.wait() == 5


def test_ctrl_c_interrupts_a_command_that_has_no_terminal(open_screen: Callable[..., Screen]) -> None:
    screen = open_screen("run", "tail", "-f", "/etc/passwd")  # a shell may lose a signal while it starts a program
    screen.wait_for("root:")
    assert not screen.is_raw()
    screen.type("\x03")
    assert screen.wait() == 130


def test_output_floods_and_a_slow_terminal_do_not_lock_up(shell: Screen) -> None:
    shell.type("yes | head -n 200000; echo fl''ood over\r")
    shell.wait_for("flood over\r\n", timeout_s=40)


def test_colours_are_for_terminals_that_want_them(
    open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = open_screen("run", "--memory", "1", "true")
    assert screen.wait() == 125
    screen.wait_for("\x1b[")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = open_screen("run", "--memory", "1", "true")
    assert plain.wait() == 125
    plain.wait_for("skerry: memory")
    assert b"\x1b" not in plain.seen


def test_a_terminal_ends_on_time_too(open_screen: Callable[..., Screen], boxes: Path) -> None:
    screen = open_screen("run", "-it", "--timeout", "1s", "sleep", "60")
    assert screen.wait() == 124
    assert screen.mode() == screen.mode_before
    assert ids(boxes) == []


def test_a_slow_start_is_shown_and_gone_without_a_trace(
    open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    slow = (
        "import asyncio, sys; from skerry.cli.output import spinner\n"
        "async def main():\n"
        "    async with spinner('starting'): await asyncio.sleep(1.3)\n"
        "    async with spinner('nothing to see'): await asyncio.sleep(0.1)\n"
        "asyncio.run(main()); print('done')"
    )
    monkeypatch.setattr(f"{__package__}.screen.PROGRAM", (PROGRAM[0], "-c", slow))
    screen = open_screen()
    screen.wait_for("starting")
    screen.wait_for("\x1b[?25h")  # the cursor is back
    screen.wait_for("\x1b[2Kdone")
    assert screen.wait() == 0
    assert b"nothing" not in screen.seen


def test_exec_gives_its_command_this_terminal(open_screen: Callable[..., Screen], box: str) -> None:
    screen = open_screen("exec", "-it", "-e", "PS1=> ", "box", "--", "bash", "--norc")
    screen.wait_for("> ")
    assert screen.is_raw()
    screen.type("stty size; exit 7\r")
    screen.wait_for("30 100\r\n")
    assert screen.wait() == 7
    assert screen.mode() == screen.mode_before


def test_attach_without_a_process_is_a_shell_on_this_terminal(open_screen: Callable[..., Screen], box: str) -> None:
    screen = open_screen("attach", "-t", "box")
    screen.type("tty; exit 3\r")
    screen.wait_for("/dev/pts/")
    assert screen.wait() == 3


def test_two_keys_leave_a_terminal_that_lives_on(open_screen: Callable[..., Screen], box: str) -> None:
    started = open_screen("exec", "-dt", "-e", "PS1=> ", "box", "--", "bash", "--norc")
    assert started.wait() == 0
    number = started.seen.decode().split()[-1]
    for word in ("first", "second"):
        screen = open_screen("attach", "box", number)
        screen.wait_for("> ")
        screen.type(f"echo {word}\x10\x10''word\r" if word == "first" else "echo sec''ond\r")
        screen.wait_for("second\r\n" if word == "second" else "word")
        screen.type("\x10")
        screen.type("\x11")
        assert screen.wait() == 0
        assert screen.mode() == screen.mode_before


def test_tables_end_where_the_terminal_does(open_screen: Callable[..., Screen], box: str) -> None:
    narrow = open_screen("ps")
    narrow.resize(30, 20)
    assert narrow.wait() == 0
    lines = narrow.seen.decode().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert len(lines) == 2
    assert [line for line in lines if len(line) > 20] == []


def test_stats_are_drawn_again_in_their_place(open_screen: Callable[..., Screen], box: str) -> None:
    screen = open_screen("stats")
    for _ in range(2):
        screen.wait_for("\x1b[H\x1b[J")
        screen.wait_for("box")
    screen.type("\x03")
    assert screen.wait() == 130
