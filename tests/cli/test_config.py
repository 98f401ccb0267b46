from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skerry import config
from skerry.errors import ConfigError


def test_flags_come_before_environment_before_file_before_defaults(
    own_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.load().project == "default"
    own_settings.write_text('project = "file"\n')
    assert config.load().project == "file"
    monkeypatch.setenv("SKERRY_PROJECT", "environment")
    assert config.load().project == "environment"
    assert config.load({"project": "flag"}).project == "flag"
    assert config.load({"project": None}).project == "environment"


def test_every_value_knows_its_origin(own_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_settings.write_text('lifetime = "1h"\n[providers.mock]\nspeed = 3\n')
    monkeypatch.setenv("SKERRY_PROVIDER", "mock")
    loaded = config.load({"project": "mine"})
    assert loaded.origins == {
        **dict.fromkeys(("url", "token", "ca"), "default"),
        "provider": "$SKERRY_PROVIDER",
        "state_dir": "default",
        "project": "--project",
        "lifetime": str(own_settings),
        "idle": "default",
        "timeout": "default",
        "database": "default",
        "max_sandboxes": "default",
        "max_boots": "default",
        "min_free_memory": "default",
        "log": "default",
        **dict.fromkeys(
            (f"ledger.{name}" for name in ("enabled", "max_bytes", "keep", "when_full", "commands", "redact")),
            "default",
        ),
        **dict.fromkeys((f"admission.{name}" for name in config.AdmissionSettings.__struct_fields__), "default"),
        **dict.fromkeys((f"server.{name}" for name in config.ServerSettings.__struct_fields__), "default"),
        "providers.mock.speed": str(own_settings),
    }
    assert loaded.values().keys() == loaded.origins.keys()


def test_settings_of_the_ledger_come_from_the_file_and_from_variables(
    own_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.load().ledger == config.LedgerSettings()
    own_settings.write_text('[ledger]\nkeep = 3\nmax_bytes = "1M"\ncommands = "names"\nredact = ["a+", "b"]\n')
    monkeypatch.setenv("SKERRY_LEDGER__KEEP", "5")
    monkeypatch.setenv("SKERRY_LEDGER__ENABLED", "false")
    loaded = config.load()
    assert loaded.ledger == config.LedgerSettings(
        enabled=False, keep=5, max_bytes=1 << 20, commands="names", redact=("a+", "b")
    )
    assert loaded.origins["ledger.keep"] == "$SKERRY_LEDGER__KEEP"
    assert loaded.origins["ledger.max_bytes"] == str(own_settings)


def test_provider_settings_from_the_environment_join_those_of_the_file(
    own_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_settings.write_text('[providers.local]\nstate_dir = "/a"\nother = 1\n')
    monkeypatch.setenv("SKERRY_PROVIDERS__LOCAL__STATE_DIR", "/b")
    assert config.load().providers == {"local": {"state_dir": "/b", "other": 1}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ("project = 1", "project is 1"),
        ('project = ""', "not empty"),
        ('lifetime = "soon"', "not a duration"),
        ('state_dir = "here"', "absolute"),
        ("providers = 1", "one table for each provider"),
        ("ledger = 1", "unknown key 'ledger'"),
        ("[ledger]\ncolour = 1", "unknown key 'colour' in \\[ledger\\]"),
        ("[ledger]\nenabled = 3", "ledger.enabled is 3"),
        ('[ledger]\nmax_bytes = "much"', "ledger.max_bytes is 'much'"),
        ("[ledger]\nmax_bytes = 0", "at least 1"),
        ("[ledger]\nkeep = -1", "at least 0"),
        ('[ledger]\nwhen_full = "panic"', "ledger.when_full is 'panic'"),
        ('[ledger]\ncommands = "all"', "ledger.commands is 'all'"),
        ('[ledger]\nredact = ["("]', "ledger.redact"),
        ("[providers]\nlocal = 1", "one table for each provider"),
        ("project = ", "cannot be read"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(own_settings: Path, text: str, told: str) -> None:
    own_settings.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        config.load()
    assert str(own_settings) in str(caught.value)


@pytest.mark.parametrize("name", ["SKERRY_COLOUR", "SKERRY_PROVIDERS", "SKERRY_PROVIDERS__LOCAL"])
def test_an_unknown_variable_is_an_error_that_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"{name}: no setting"):
        config.load()


def test_a_file_that_was_named_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKERRY_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="no such file"):
        config.load()


def test_a_wrong_provider_setting_is_an_error_that_names_its_place(own_settings: Path) -> None:
    own_settings.write_text("[providers.mock]\nno_such_setting = 1\n")
    with pytest.raises(ConfigError, match="no_such_setting") as caught:
        config.load().load_provider("mock")
    assert str(own_settings) in str(caught.value)


@pytest.mark.parametrize("root", [True, False])
def test_folders_follow_the_user(root: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SKERRY_CONFIG")
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config/skerry").mkdir(parents=True)
    (tmp_path / ".config/skerry/config.toml").write_text('project = "home"')
    loaded = config.load()
    assert loaded.state_dir == ("/var/lib/skerry" if root else str(tmp_path / "skerry"))
    assert root or loaded.project == "home"


def test_the_command_shows_value_and_origin(call, own_settings: Path) -> None:
    own_settings.write_text('project = "file"\n')
    code, out, _ = call("config")
    assert code == 0
    assert ["project", "file", str(own_settings)] in [line.split() for line in out.splitlines()]
    code, out, _ = call("config", "--json")
    assert json.loads(out)["project"] == {"value": "file", "origin": str(own_settings)}
