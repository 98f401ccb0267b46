from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skerry import cli, providers
from skerry.cli.errors import EXIT_CODES
from skerry.errors import InvalidSpec, ProviderUnavailable, all_errors
from skerry.version import __version__


def test_every_error_has_an_exit_code() -> None:
    assert {error.code for error in all_errors() if error.__module__ == "skerry.errors"} == EXIT_CODES.keys()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_table_of_commands_says_what_each_says_of_itself(name: str) -> None:
    module, text = cli.COMMANDS[name]
    command = getattr(importlib.import_module(f"skerry.cli.{module}"), name.replace("-", "_"))
    assert command.help.splitlines()[0] == text
    assert command.name == name


def test_help_lists_every_command(call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_version_imports_neither_asyncio_nor_msgspec_nor_rich() -> None:
    script = (
        "import sys; from skerry import cli; code = cli.invoke(['version']); "
        "print(sorted({'asyncio', 'msgspec', 'rich', 'json'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_version_tells_version_python_and_platform(call) -> None:
    code, out, _ = call("version", "--json")
    assert code == 0
    assert json.loads(out).keys() == {"version", "python", "platform"}
    assert call("version")[1].startswith(f"skerry {__version__} (Python 3.")
    assert call("--version")[1] == f"skerry {__version__}\n"


@pytest.mark.parametrize("args", [("nonsense",), ("run", "--nonsense"), ("run",), ("check",), ("completion", "cmd")])
def test_wrong_usage_is_125_with_one_line_on_stderr(call, args: tuple[str, ...]) -> None:
    code, out, err = call(*args)
    assert (code, out) == (125, "")
    assert err.startswith("skerry: ")
    assert err.count("\n") == 1


def test_no_command_at_all_shows_the_help(call) -> None:
    code, out, err = call()
    assert code == 125
    assert "Commands" in out + err


def test_an_error_is_a_line_on_stderr(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_NONSENSE", "1")
    code, out, err = call("config")
    assert (code, out) == (125, "")
    assert err.startswith("skerry: SKERRY_NONSENSE: no setting")


def test_an_error_is_an_object_with_json(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_NONSENSE", "1")
    code, out, err = call("config", "--json")
    assert (code, err) == (125, "")
    assert json.loads(out)["error"]["code"] == "config_error"


def test_an_unexpected_exception_says_how_to_get_the_trace(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("skerry.config.load", break_down)
    code, _, err = call("config")
    assert code == 125
    assert "ZeroDivisionError: oh" in err
    assert "SKERRY_DEBUG=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("SKERRY_DEBUG", "1")
    assert "Traceback" in call("config")[2]


def test_a_reader_that_goes_away_is_no_error(skerry) -> None:
    script = (
        'skerry() { "$0" -c \'from skerry.cli import main; main()\' "$@"; }; { skerry config; echo $? >&2; } | true'
    )
    done = subprocess.run(["bash", "-c", script, sys.executable], capture_output=True, text=True)
    assert done.stderr in ("141\n", "0\n")  # 0 when it was written before the reader had gone


def test_closed_standard_streams_are_no_error() -> None:
    script = "exec \"$0\" -c 'from skerry.cli import main; main()' config <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", script, sys.executable]).returncode == 0


@pytest.mark.parametrize("args", ["config", "config --json", "--help"])
def test_output_that_finds_no_room_is_told_and_is_no_bug(args: str) -> None:
    script = f"exec \"$0\" -c 'from skerry.cli import main; main()' {args} > /dev/full"
    done = subprocess.run(["bash", "-c", script, sys.executable], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (125, "skerry: cannot write the output: No space left on device\n")


def test_what_the_character_set_lacks_is_no_failure(skerry, own_settings: Path) -> None:
    own_settings.write_text('state_dir = "/tmp/\u6f22"\n')
    done = skerry("config", env={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr
    assert b"/tmp/? " in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_the_shell_accepts(call, shell: str) -> None:
    code, out, _ = call("completion", shell)
    assert code == 0
    assert "_SKERRY_COMPLETE" in out
    if shutil.which(shell) is None:
        assert shell != "bash"
        return
    subprocess.run([shell, "-n"], input=out, text=True, check=True)


@pytest.mark.parametrize("words", ["skerry run --provider ", "skerry check "])
def test_completion_offers_the_providers(skerry, words: str) -> None:
    count = str(len(words.split()))
    done = skerry(env={"_SKERRY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count})
    assert done.stdout.decode().split() == [f"plain,{name}" for name in providers.names()]


def test_completion_offers_files_to_copy(skerry) -> None:
    done = skerry(env={"_SKERRY_COMPLETE": "bash_complete", "COMP_WORDS": "skerry cp ./no", "COMP_CWORD": "2"})
    assert done.stdout.split() == [b"file,./no"]


def test_doctor_tells_each_provider_and_its_fix(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str, settings: object = None) -> None:
        raise ProviderUnavailable(name, "it is not there", fix=f"apt-get install {name}")

    monkeypatch.setattr(providers, "load", unavailable)
    code, out, _ = call("doctor")
    assert code == 125
    assert all(f"apt-get install {name}" in out for name in providers.names())
    code, out, _ = call("doctor", "--json")
    assert code == 125
    assert not json.loads(out)["ok"]


def test_doctor_survives_a_provider_that_breaks(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "load", lambda *_: 1 / 0)
    code, out, _ = call("doctor")
    assert code == 125
    assert "division by zero" in out


def test_doctor_tells_of_a_default_provider_that_nobody_knows(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_PROVIDER", "nonsense")
    code, out, _ = call("doctor")
    assert code == 125
    assert "nonsense (default)  no provider is called 'nonsense'" in out


def test_doctor_tells_of_a_state_folder_that_is_none(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "file"))
    told = call("doctor")[1]
    assert f"{tmp_path}/file: not writable" in told
    assert "not needed: no sandbox has rules" in told


def test_doctor_tells_of_a_gate_and_a_ledger_that_it_may_not_look_at(
    call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    for name in ("gate", "ledger"):
        (tmp_path / "state" / name).symlink_to(name)  # nobody can look into it, root neither
    told = call("doctor")[1]
    assert "--  gate                whether it runs and is needed cannot be seen" in told
    assert "--  ledger              [Errno" in told


def test_doctor_tells_whether_the_ledger_is_written(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path))
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger/ledger.jsonl").write_bytes(b"x" * 2048)
    assert "ok  ledger              2K; skerry ledger verify" in call("doctor")[1]
    monkeypatch.setenv("SKERRY_LEDGER__ENABLED", "false")
    assert "--  ledger              off: " in call("doctor")[1]


def test_doctor_survives_a_state_folder_that_cannot_be_looked_at(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_STATE_DIR", f"/tmp/{'x' * 300}")  # as with one that is not ours: no answer but an error
    assert call("doctor")[1].startswith("ok  host ")


def test_doctor_tells_how_each_limit_is_held(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_PROVIDER", "mock")
    code, out, _ = call("doctor", "--json")
    found = json.loads(out)
    mock = next(each for each in found["providers"] if each["name"] == "mock")
    assert code == 0
    assert found["ok"]
    assert mock["available"]
    assert all(how.keys() == {"by", "why_not"} for how in mock["details"].values())
    assert found["host"]["cgroup"] in ("v1", "v2", "none")


def test_check_of_an_unknown_provider_names_those_there_are(call) -> None:
    code, _, err = call("check", "nonsense")
    assert code == 125
    assert "there are: " in err


def test_check_says_what_it_needs_when_pytest_is_missing(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = call("check", "mock")
    assert code == 125
    assert "skerry[testing]" in err


def test_an_unknown_option_is_an_object_with_json_too(call) -> None:
    code, out, err = call("ps", "--nonsense", "--json")
    assert (code, err) == (125, "")
    assert json.loads(out)["error"]["code"] == "usage"


def test_a_wrong_choice_names_those_there_are(call) -> None:
    assert call("run", "--network", "a b", "true") == (
        125, "", "skerry: network: 'a b' must be none, rules, bridge, host, or the name of a network of the engine\n",
    )  # fmt: skip


@pytest.mark.parametrize("option", ["-e", "-w", "-v", "--root", "--label"])
def test_bytes_that_are_no_text_are_refused(call, option: str) -> None:
    code, _, err = call("run", option, "/k=\udcff:/x", "true")
    assert code == 125
    assert "bug" not in err
    assert "UTF-8" in err or option == "--label"


def test_json_errors_of_a_wrong_spec(call) -> None:
    code, out, _ = call("run", "--json", "--memory", "lots", "true")
    assert code == 125
    assert json.loads(out)["error"]["code"] == InvalidSpec.code


def test_check_passes_on_how_the_suite_ended(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\ndef test_not(): pytest.skip('why')\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", str(suite)]
    monkeypatch.setattr("skerry.cli.doctor._pytest", lambda _: command)
    code, out, _ = call("check", "mock", "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 1
    assert told["tests"] == 3
    assert [each["test"] for each in told["failed"]] == ["test_bad"]
    assert [each["message"] for each in told["skipped"]] == ["why"]
    assert call("check", "mock")[0] == 1
