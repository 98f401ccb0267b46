"""The log: quiet unless it is asked for, one line a record, and nothing secret in it."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry import config, log
from skerry.cli import job
from skerry.errors import ConfigError, WrongState
from skerry.providers.mock import Mock

from .conftest import Run
from .screen import PROGRAM, Screen

Call = Callable[..., tuple[int, str, str]]
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) +skerry(\.\w+)*: \S.*"
)


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    yield
    log.configure("off")


def test_nothing_is_logged_by_default(mock: Mock, call: Call) -> None:
    assert call("run", "--", "echo", "hello") == (0, "hello\n", "")


def test_warnings_too_are_silent_by_default(mock: Mock, call: Call) -> None:
    assert call("ps")[0] == 0
    logging.getLogger("skerry.manager").warning("the box is left behind")
    assert call("ps")[2] == ""


def test_one_v_shows_how_a_sandbox_comes_and_goes(mock: Mock, call: Call) -> None:
    code, out, err = call("-v", "run", "--", "echo", "hello")
    assert (code, out) == (0, "hello\n")
    assert all(LINE.fullmatch(line) for line in err.splitlines()), err
    created = re.search(r"INFO +skerry\.cli: sandbox (\S+) is created by mock\n", err)
    assert created
    assert f"sandbox {created[1]} is destroyed\n" in err
    assert "DEBUG" not in err


def test_one_v_names_the_sandbox_of_a_command(mock: Mock, call: Call) -> None:
    id = call("create", "--name", "box")[1].strip()
    assert f"sandbox {id} is opened as box" in call("-v", "exec", "box", "--", "true")[2]


def test_v_after_the_command_is_the_commands_own(mock: Mock, call: Call, tmp_path: Path) -> None:
    call("create", "--name", "box", "--data")
    code, _, err = call("rm", "-v", "box")
    assert (code, err) == (0, "")


async def test_two_v_show_a_failure_that_was_overcome(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise WrongState("it has ended")

    log.configure("info")
    await job._ignore_end(fail())
    assert capsys.readouterr().err == ""
    log.configure("debug")
    await job._ignore_end(fail())
    assert "DEBUG   skerry.cli: the command has just ended: it has ended\n" in capsys.readouterr().err


def test_two_v_are_debug_and_more_are_no_error(mock: Mock, call: Call) -> None:
    for flag, level in (("-v", "info"), ("-vv", "debug"), ("-vvv", "debug")):
        assert re.search(rf"^log +{level} +-v$", call(flag, "config")[1], re.MULTILINE)


def test_the_data_of_a_command_is_not_touched_by_the_log(mock: Mock, call: Call) -> None:
    call("create", "--name", "box")
    assert call("-vv", "ps", "-q")[1] == call("ps", "-q")[1]


def test_values_of_the_environment_are_never_in_the_log(skerry: Run, boxes: Path) -> None:
    done = skerry("-vv", "run", "-e", "TOKEN=hunter2", "-e", "FROM_HERE", "--", "true", env={"FROM_HERE": "hunter2"})
    assert done.returncode == 0
    assert b"is created" in done.stderr
    assert b"hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("off", []),
        ("error", []),
        ("warning", ["skerry.store"]),
        ("debug", ["skerry.store", "skerry.manager", "skerry.manager.repair"]),
        ("skerry.manager=debug", ["skerry.manager", "skerry.manager.repair"]),
        ("debug,skerry.manager=off", ["skerry.store"]),
        (" warning , skerry.manager.repair=debug", ["skerry.store", "skerry.manager.repair"]),
    ],
)
def test_a_setting_chooses_levels_and_loggers(
    setting: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("debug,skerry.store=error")  # the one before leaves nothing
    log.configure(setting)
    logging.getLogger("skerry.store").warning("a")
    logging.getLogger("skerry.manager").debug("b")
    logging.getLogger("skerry.manager.repair").debug("c")
    assert [line.split()[2].rstrip(":") for line in capsys.readouterr().err.splitlines()] == shown
    assert log.is_on() == (setting != "off")


@pytest.mark.parametrize(
    "setting", ["loud", "DEBUG", "skerry.manager=", "=", "=debug", "asyncio=debug", "skerrymanager=debug", "info,"]
)
def test_a_wrong_setting_says_what_is_right(setting: str, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("SKERRY_LOG", setting)
    with pytest.raises(ConfigError, match="must be off, error, warning, info, debug"):
        config.load()
    code, _, err = call("ps")
    assert code == 125
    assert err.startswith(f"skerry: $SKERRY_LOG: log is {setting!r}; it must be off, error, warning, info, debug")


def test_flags_come_before_the_environment_before_the_file(
    own_settings: Path, monkeypatch: pytest.MonkeyPatch, mock: Mock, call: Call
) -> None:
    own_settings.write_text('log = "info"\n')
    assert "is created" in call("create")[2]
    monkeypatch.setenv("SKERRY_LOG", "error")
    assert call("create")[2] == ""
    assert "is created" in call("-v", "create")[2]


FORGERIES = ["a\nskerry: fine", "a\r2026", "a\x1b[2K", "a\u2028b", "a\u202eb", "\ud800"]


@pytest.mark.parametrize("text", FORGERIES, ids=ascii)
def test_a_record_is_one_line_whatever_a_box_says(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest would keep it for its report, which a worker cannot send
    monkeypatch.setattr(logging.getLogger("skerry"), "propagate", False)
    log.configure("debug")
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("skerry.agent").debug("it said %s", text, exc_info=True)
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.isprintable()
    assert "ValueError: " in line


def test_passwords_of_addresses_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.getLogger("skerry.store").info("no answer of %s", "postgresql://me:hunter2@db/skerry")
    assert capsys.readouterr().err.endswith("no answer of postgresql://me:***@db/skerry\n")


def test_a_reader_of_the_log_that_has_gone_is_no_error(mock: Mock, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert call("-vv", "create")[0] == 0


@pytest.mark.parametrize(
    ("statement", "said"),
    [("", ""), ("logging.basicConfig(format='%(name)s %(message)s');", "skerry.manager it is lost\n")],
)
def test_a_program_hears_of_us_only_if_it_configures_logging(statement: str, said: str) -> None:
    script = (
        f"import logging; {statement} from skerry import SandboxManager; "
        "logging.getLogger('skerry.manager').warning('it is lost')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == said


def test_importing_a_public_name_does_not_import_logging() -> None:
    script = "import sys; from skerry import SkerryError; print('logging' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("args", [("version",), ("run", "--help"), ("--help",)])
def test_commands_that_need_no_log_do_not_import_it(args: tuple[str, ...]) -> None:
    script = f"import sys; from skerry import cli; cli.invoke({args!r}); print('logging' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_log_leaves_no_room_for_a_spinner(
    open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    slow = (
        "import asyncio; from skerry import log; from skerry.cli.output import spinner; log.configure('info')\n"
        "async def main():\n"
        "    async with spinner('starting'): await asyncio.sleep(1.3)\n"
        "asyncio.run(main()); print('done')"
    )
    monkeypatch.setattr(f"{__package__}.screen.PROGRAM", (PROGRAM[0], "-c", slow))
    screen = open_screen()
    assert screen.wait() == 0
    assert screen.seen == b"done\r\n"


def test_a_line_begins_at_the_left_of_a_raw_terminal_too(
    open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = (
        "import logging; from skerry import log; from skerry.cli.terminal import raw_mode; log.configure('info')\n"
        "with raw_mode(): logging.getLogger('skerry.cli').info('here')"
    )
    monkeypatch.setattr(f"{__package__}.screen.PROGRAM", (PROGRAM[0], "-c", raw))
    screen = open_screen()
    assert screen.wait() == 0
    assert screen.seen.endswith(b"skerry.cli: here\r\n")
