"""What `skerry doctor` tells of container engines: of one that is there, of none, and of one that says nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.daemons import Daemon

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def engine(call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """What it finds of `docker` at an address."""
    monkeypatch.setenv("SKERRY_PROVIDER", "docker")

    def examine(address: str) -> dict[str, Any]:
        monkeypatch.setenv("DOCKER_HOST", address)
        code, out, _ = call("doctor", "--json")
        found: dict[str, Any] = next(each for each in json.loads(out)["providers"] if each["name"] == "docker")
        assert code == (0 if found["available"] else 125)
        return found

    return examine


def test_the_doctor_tells_the_room_of_the_host_and_what_it_is_short_of(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path))
    assert "memory free, 0B promised of any amount" in call("doctor")[1]
    assert not (tmp_path / "registry.db").exists(), "to look makes no registry"
    monkeypatch.setenv("SKERRY_ADMISSION__MIN_FREE_DISK", "1000000T")
    monkeypatch.setenv("SKERRY_ADMISSION__OVERCOMMIT", "1.5")
    out = call("doctor")[1]
    assert "(overcommit 1.5)" in out
    assert "must stay free (admission.min_free_disk)" in out
    room = json.loads(call("doctor", "--json")[1])["host"]["room"]
    assert room["memory_promisable_bytes"] == int(1.5 * room["memory_bytes"])
    assert (room["overcommit"], room["min_free_memory"], room["wait_s"]) == (1.5, 256 << 20, 5.0)


def test_it_tells_where_a_daemon_is_and_how_limits_are_held(engine: Doctor, docker_daemon: Daemon) -> None:
    found = engine(docker_daemon.address)
    details = found["details"]
    assert found["isolation"] == "container"
    assert details["daemon"]["by"] == f"{docker_daemon.address}, on this machine"
    assert details["memory"]["by"] == "the engine's cgroup, without swap"
    assert "loop device" in details["disk"]["by"] or "tmpfs" in details["disk"]["by"]
    assert "runc" in details["runtimes"]["by"].split(", ")


def test_it_tells_that_docker_knows_gvisor(engine: Doctor, docker_daemon: Daemon, gvisor: str) -> None:
    assert engine(docker_daemon.address)["details"]["gvisor"]["by"] == f"runtime {gvisor}"


def test_it_tells_how_to_get_a_daemon_that_is_not_there(engine: Doctor, tmp_path: Path) -> None:
    found = engine(f"unix://{tmp_path}/none.sock")
    assert "No such file or directory" in found["reason"]
    assert found["fix"].startswith("install Docker")


def test_a_daemon_that_says_nothing_is_not_waited_for_long(
    engine: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.providers.dockerapi.provider._CHECK_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/mute.sock")
        listener.listen()
        found = engine(f"unix://{tmp_path}/mute.sock")
    assert "did not answer within 0.05 s" in found["reason"]
    assert found["fix"].startswith("install Docker")


# the timer

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A systemd that runs, as far as can be seen: its units, and below `asked` what it was asked for."""
    (tmp_path / "bin").mkdir()
    systemctl = tmp_path / "bin/systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ ! -e {tmp_path}/refuses ] || {{ echo no >&2; exit 1; }}\n'
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("skerry.cli.doctor._SYSTEMD_RUNS", tmp_path)
    monkeypatch.setattr("skerry.cli.doctor._SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setenv("SKERRY_STATE_DIR", f'{tmp_path}/a 100% "odd" $place')
    return tmp_path


def test_a_timer_is_set_for_root_and_seen_from_then_on(
    systemd: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    code, out, _ = call("doctor", "--timer", "--json")
    units = systemd / "units"
    files = [f"{units}/skerry-reconcile.service", f"{units}/skerry-reconcile.timer"]
    assert (code, json.loads(out)) == (0, {"timer": True, "files": files, "cron": None})
    assert (systemd / "asked").read_text() == "daemon-reload\nenable --now skerry-reconcile.timer\n"
    assert not json.loads(call("doctor", "--json")[1])["host"]["timer"]
    (units / "timers.target.wants").mkdir()
    (units / "timers.target.wants/skerry-reconcile.timer").symlink_to(files[1])  # as systemctl does
    assert json.loads(call("doctor", "--json")[1])["host"]["timer"]
    assert "every minute" in call("doctor")[1]


def test_the_units_are_what_systemd_takes_and_run_reconcile_on_this_registry(systemd: Path, call: Call) -> None:
    assert call("doctor", "--timer")[0] == 0
    units = sorted(systemd.rglob("skerry-reconcile.*"))
    service = units[0].read_text()
    assert '" "reconcile" "--quiet"\n' in service
    assert f'Environment="SKERRY_STATE_DIR={systemd}/a 100%% \\"odd\\" $place"' in service
    assert "OnUnitInactiveSec=1min" in units[1].read_text()
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze to have the units checked by")
    done = subprocess.run([analyze, "verify", *map(str, units)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "skerry-reconcile" in line] == []


def test_a_timer_of_a_plain_user_is_the_users_own(systemd: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(systemd / "config"))
    assert call("doctor", "--timer")[0] == 0
    assert (systemd / "config/systemd/user/skerry-reconcile.timer").exists()
    assert (systemd / "asked").read_text().startswith("--user daemon-reload\n--user enable")


def test_a_systemd_that_refuses_the_timer_is_an_error(systemd: Path, call: Call) -> None:
    (systemd / "refuses").touch()
    code, _, err = call("doctor", "--timer")
    assert code == 125
    assert "daemon-reload failed: no" in err


def test_where_no_systemd_runs_the_line_for_a_crontab_is_told(
    call: Call, boxes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("skerry.cli.doctor._SYSTEMD_RUNS", tmp_path / "none")
    monkeypatch.delenv("SKERRY_PROVIDERS__LOCAL__CACHE_DIR")
    monkeypatch.delenv("SKERRY_PROVIDERS__LOCAL__STATE_DIR")
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "100% odd"))
    code, out, err = call("doctor", "--timer")
    assert code == 0
    assert "crontab" in err
    schedule, command = out.split(" SKERRY", 1)
    assert schedule == "* * * * *"
    done = subprocess.run(["sh", "-c", f"SKERRY{command}".replace("\\%", "%")], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "100% odd/registry.db").exists()


def test_a_timer_that_would_not_see_the_same_registry_is_refused(
    systemd: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_DATABASE", "postgresql://me:secret@db/x")
    code, _, err = call("doctor", "--timer")
    assert code == 125
    assert "set database in the file" in err
    assert not (systemd / "asked").exists()
