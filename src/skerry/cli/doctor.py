"""`skerry doctor` and `skerry check`: what works on this machine, and how to get the rest."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from skerry.cli.errors import OURS
from skerry.cli.options import live_records, load_config, provider_names
from skerry.cli.output import SHORT_ID, echo, json_option, print_json, print_one, printable, say, spinner, to_data
from skerry.cli.registry import refuse_server
from skerry.config import Config, variable
from skerry.errors import ConfigError, SkerryError
from skerry.manager import health
from skerry.manager.admission import HostRoom, describe
from skerry.units import format_size

if TYPE_CHECKING:
    from skerry.model.records import Record
    from skerry.providers.base import Provider

_SYSTEMCTL_S = 20.0
_UNIT = "skerry-reconcile"
_SYSTEM_UNITS = Path("/etc/systemd/system")
_SYSTEMD_RUNS = Path("/run/systemd/system")
_SERVICE = """\
[Unit]
Description=End the sandboxes that have outlived their lifetime, and repair what a crash left

[Service]
Type=oneshot
Environment={environment}
ExecStart={command}
"""
_TIMER = """\
[Unit]
Description=Every minute: {unit}.service

[Timer]
OnActiveSec=1min
OnUnitInactiveSec=1min
AccuracySec=5s

[Install]
WantedBy=timers.target
"""


@click.command()
@click.option("--timer", is_flag=True, help="Have `skerry reconcile` run every minute, so that lifetimes need nobody.")
@json_option
def doctor(timer: bool, as_json: bool) -> int:
    """Tell what works on this machine, and how to get the rest.

    With --timer, units of systemd are written and started, for root or for the user who calls; where systemd does not
    run, the line for a crontab is told.
    """
    config = load_config()
    if timer:
        refuse_server(config, "`skerry doctor --timer`")
        return _set_timer(config, as_json)
    if config.url:
        findings = asyncio.run(_ask_server(config))
        (print_json if as_json else _print)(findings)
        return 0 if findings["ok"] else OURS
    providers = asyncio.run(_examine_all(config))
    works = any(each["name"] == config.provider and each["available"] for each in providers)
    has_timer = os.path.lexists(_units() / "timers.target.wants" / f"{_UNIT}.timer")
    room = to_data(describe(config, asyncio.run(_promised(config))))
    found = {
        "host": {**health.host(config), "timer": has_timer, "room": room},
        "gate": asyncio.run(health.gate(config, _records)),
        "ledger": health.ledger(config),
        "providers": providers,
    }
    findings = {"ok": works, "default_provider": config.provider, **found}
    (print_json if as_json else _print)(findings)
    return 0 if works else OURS


async def _ask_server(config: Config) -> dict[str, Any]:
    """What the doctor of a server finds there."""
    from skerry.remote.api import Api

    async with spinner(f"asking {config.url}"):
        api = Api(config.url, config.token or None, ca=config.ca or None)
        found: dict[str, Any] = await api.get("/doctor", dict[str, Any])
    return found


async def _examine_all(config: Config) -> list[dict[str, Any]]:
    async with spinner("looking at the providers"):
        return await health.examine_all(config)


async def _records() -> list[Record]:
    return await asyncio.to_thread(live_records)  # which runs a loop of its own


async def _promised(config: Config) -> int:
    """Memory that sandboxes were promised; none if the registry cannot be read, or is not there: to look makes none."""
    from skerry.store import Store

    if "://" not in config.database and not os.path.exists(config.database):
        return 0
    try:
        async with aclosing(await Store.open(config.database)) as store:
            return await store.promised_memory()
    except SkerryError:
        return 0


def _units() -> Path:
    """Folder of systemd's units: of the system for root, else of the user."""
    if os.geteuid() == 0:
        return _SYSTEM_UNITS
    return Path(variable("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd/user"


def _set_timer(config: Config, as_json: bool) -> int:
    ours = (key for key in config.origins if key.startswith(("database", "providers.")))
    unseen = ", ".join(sorted(key for key in ours if config.origins[key].startswith("$")))
    if unseen:
        raise ConfigError(f"a timer does not see your environment: set {unseen} in the file, see skerry config")
    environment = {"SKERRY_STATE_DIR": config.state_dir}
    if file := variable("SKERRY_CONFIG"):
        environment["SKERRY_CONFIG"] = os.path.abspath(file)
    argv = [sys.executable, "-c", "from skerry.cli import main; main()", "reconcile", "--quiet"]
    cron, files = None, []
    if _SYSTEMD_RUNS.is_dir() and shutil.which("systemctl") is not None:
        files = _install(environment, argv)
    else:
        words = [*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(argv)]
        cron = "* * * * * " + " ".join(words).replace("%", "\\%")
    if cron is not None and not as_json:
        say("systemd does not run here; add this line to your crontab:")
    print_one(as_json, {"timer": bool(files), "files": files, "cron": cron}, *([cron] if cron else files))
    return 0


def _install(environment: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """Write and start the units; give the files. Raises ConfigError if systemd refuses them."""
    folder = _units()
    settings = " ".join(_quoted(f"{name}={value}") for name, value in environment.items())
    # What is told of the environment may hold a dollar; in a command that would begin a variable.
    command = " ".join(_quoted(word).replace("$", "$$") for word in argv)
    files = {
        f"{_UNIT}.service": _SERVICE.format(environment=settings, command=command),
        f"{_UNIT}.timer": _TIMER.format(unit=_UNIT),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    systemctl = ["systemctl"] if os.geteuid() == 0 else ["systemctl", "--user"]
    for words in (["daemon-reload"], ["enable", "--now", f"{_UNIT}.timer"]):
        done = subprocess.run([*systemctl, *words], capture_output=True, text=True, timeout=_SYSTEMCTL_S, check=False)
        if done.returncode != 0:
            raise ConfigError(f"{' '.join([*systemctl, *words])} failed: {done.stderr.strip()}")
    return [str(folder / name) for name in files]


def _quoted(word: str) -> str:
    """Quote a word of a unit file."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _print(findings: dict[str, Any]) -> None:
    host = findings["host"]
    _line(True, "host", f"{host['kernel']}, Python {host['python']}, cgroup {host['cgroup']}, as {host['user']}")
    fix = "" if host["state_dir_writable"] else "not writable: mkdir -p it, or set SKERRY_STATE_DIR; "
    _line(host["state_dir_writable"], "state", f"{host['state_dir']}: {fix}{format_size(host['disk_free_bytes'])} free")
    if "room" in host:  # an older server does not tell
        room = msgspec.convert(host["room"], HostRoom)
        _line(not room.short, "room", str(room))
        if room.short:
            _line(False, "  short", room.short)
    if "timer" in host:  # a server holds lifetimes by itself
        how = "none: lifetimes are held while something of ours runs, or by skerry doctor --timer"
        _line(host["timer"], "timer", "every minute" if host["timer"] else how)
    _print_gate(findings["gate"])
    ledger = findings["ledger"]
    size = f"{format_size(ledger['bytes'])}; skerry ledger verify tells whether it is whole"
    off = "off: what is done is not written down, see ledger.enabled of skerry config"
    _line(ledger["enabled"] and not ledger["error"], "ledger", ledger["error"] or (size if ledger["enabled"] else off))
    for provider in findings["providers"]:
        default = " (default)" if provider["name"] == findings["default_provider"] else ""
        if provider["available"]:
            can = ", ".join(provider["capabilities"]) or "no optional verbs"
            _line(True, provider["name"] + default, f"isolation {provider['isolation']}; {can}")
            for field, how in provider["details"].items():
                _line(bool(how["by"]), f"  {field}", how["by"] or how["why_not"])
        else:
            _line(False, provider["name"] + default, provider["reason"])
            if provider["fix"]:
                _line(False, "  fix", provider["fix"])


def _print_gate(gate: dict[str, Any]) -> None:
    if gate["answers"]:
        _line(True, "gate", f"runs as process {gate['pid']}, for {gate['serves']} sandboxes")
    elif gate["running"]:
        _line(False, "gate", "it does not answer: end its process, and `skerry ps` starts another")
    elif gate["needed_by"]:
        _line(False, "gate", f"it does not run, and {gate['needed_by']} sandboxes have rules: `skerry ps` starts it")
    elif gate["needed_by"] is None:
        _line(False, "gate", "whether it runs and is needed cannot be seen")
    else:
        _line(True, "gate", "not needed: no sandbox has rules")
    if gate["error"]:
        _line(False, "  last error", gate["error"])
    for id, error in gate["down"].items():
        _line(False, f"  {id[:SHORT_ID]}", error)


def _line(good: bool, name: str, text: str) -> None:
    mark = click.style("ok", fg="green") if good else click.style("--", fg="red")
    echo(f"{mark}  {name:<18}  {printable(text)}")


@click.command()
@click.argument("provider", shell_complete=provider_names)
@click.option("--image", metavar="NAME", help="What its boxes are made of, where it has images; one with a shell.")
@click.option("--runtime", metavar="NAME", help="The OCI runtime, such as runsc.")
@json_option
def check(provider: str, image: str | None, runtime: str | None, as_json: bool) -> int:
    """Run the conformance suite against a provider on this machine."""
    asyncio.run(_require_working(load_config().load_provider(provider)))
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("anyio") is None:
        raise click.ClickException(
            "the suite needs pytest: pip install 'skerry[testing]', or scripts/bootstrap in a checkout"
        )
    with tempfile.TemporaryDirectory(prefix="skerry-check-") as folder:
        report = Path(folder, "report.xml")
        fields = [f"--skerry-{name}={value}" for name, value in (("image", image), ("runtime", runtime)) if value]
        argv = [*_pytest(provider), *fields, f"--junitxml={report}"]
        suite = subprocess.run(argv, stdout=sys.stderr if as_json else None)
        if as_json:
            print_json({"provider": provider, "exit_code": suite.returncode, **_summary(report)})
    return suite.returncode


async def _require_working(provider: Provider) -> None:
    """Raise ProviderUnavailable where it cannot run at all: once, and not by every test."""
    async with aclosing(provider):
        await provider.check()


def _pytest(provider: str) -> list[str]:
    """Command of the suite alone, without configuration, cache or conftest of the current folder."""
    alone = ["-c", os.devnull, "--rootdir", os.sep, "-p", "no:cacheprovider", "-o", "anyio_mode=auto"]
    suite = ["--pyargs", "skerry.testing.conformance", "--skerry-provider", provider]
    return [sys.executable, "-m", "pytest", *alone, *suite]


def _summary(report: Path) -> dict[str, Any]:
    from xml.etree import ElementTree

    if not report.exists():
        return {"tests": 0, "failed": [], "skipped": []}
    cases = list(ElementTree.parse(report).iter("testcase"))

    def having(*tags: str) -> list[dict[str, str]]:
        parts = ((case, part) for case in cases for part in case if part.tag in tags)
        return [{"test": case.get("name", ""), "message": part.get("message", "")} for case, part in parts]

    return {"tests": len(cases), "failed": having("failure", "error"), "skipped": having("skipped")}
