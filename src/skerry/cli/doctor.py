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

from skerry.cli.errors import OURS
from skerry.cli.options import live_records, load_config, provider_names
from skerry.cli.output import SHORT_ID, echo, json_option, print_json, print_one, printable, say, spinner
from skerry.config import Config, variable
from skerry.errors import ConfigError, ProviderUnavailable
from skerry.units import format_size

if TYPE_CHECKING:
    from skerry.providers.base import Provider

_DEADLINE_S = 20.0
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
        return _set_timer(config, as_json)
    providers = asyncio.run(_examine_all(config))
    works = any(each["name"] == config.provider and each["available"] for each in providers)
    found = {"host": _host(config), "gate": _gate(config), "ledger": _ledger(config), "providers": providers}
    findings = {"ok": works, "default_provider": config.provider, **found}
    (print_json if as_json else _print)(findings)
    return 0 if works else OURS


async def _examine_all(config: Config) -> list[dict[str, Any]]:
    from skerry import providers

    async with spinner("looking at the providers"), asyncio.TaskGroup() as group:
        names = sorted({*providers.names(), config.provider})  # a default that nobody knows is a finding too
        tasks = [group.create_task(_examine(config, name)) for name in names]
    return [task.result() for task in tasks]


async def _examine(config: Config, name: str) -> dict[str, Any]:
    """State of one provider. A provider that breaks is a finding, not the end of the doctor."""
    found: dict[str, Any] = {"name": name, "available": False, "reason": "", "fix": ""}
    try:
        async with asyncio.timeout(_DEADLINE_S), aclosing(config.load_provider(name)) as provider:
            await provider.check()
            details = await provider.describe()
        found |= {
            "available": True,
            "isolation": provider.isolation.name.lower(),
            "capabilities": sorted(provider.capabilities),
            "details": {field: {"by": how.by, "why_not": how.why_not} for field, how in details.items()},
        }
    except ProviderUnavailable as error:
        found |= {"reason": error.reason, "fix": error.fix}
    except TimeoutError:
        found |= {"reason": f"it did not answer within {_DEADLINE_S:g} s"}
    except Exception as error:
        found |= {"reason": str(error) or type(error).__name__}
    return found


def _host(config: Config) -> dict[str, Any]:
    cgroup = "v1" if Path("/sys/fs/cgroup/memory").exists() else "none"
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        cgroup = "v2"
    state = Path(config.state_dir)
    nearest = next(folder for folder in (state, *state.parents) if os.path.exists(folder))
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "cgroup": cgroup,
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "state_dir": str(state),
        "state_dir_writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        "disk_free_bytes": shutil.disk_usage(nearest).free,
        "timer": os.path.lexists(_units() / "timers.target.wants" / f"{_UNIT}.timer"),
    }


def _gate(config: Config) -> dict[str, Any]:
    """State of the gate; none that has never been needed is looked for in the registry."""
    from skerry.gate.client import GateClient

    found: dict[str, Any] = {"running": False, "answers": False, "pid": None, "needed_by": 0, "serves": 0}
    found |= {"down": {}, "error": ""}
    client = GateClient(config)
    try:
        found |= {"running": client.is_running(), "error": client.last_error()}
        if client.has_run():
            found["needed_by"] = sum(record.spec.network == "rules" for record in live_records())
    except OSError as error:  # the state folder is none, or not ours
        return found | {"needed_by": None, "error": str(error)}
    status = asyncio.run(client.status()) if found["running"] else None
    if status is not None:
        down = {box.id: box.error for box in status.boxes if not box.up and box.error}
        found |= {"answers": True, "pid": status.pid, "serves": len(status.boxes), "down": down, "error": status.error}
    return found


def _ledger(config: Config) -> dict[str, Any]:
    """State of the ledger: whether it is written, how large it is, and what keeps us from reading it."""
    from skerry.ledger.ledger import folder_of

    found: dict[str, Any] = {"enabled": config.ledger.enabled, "bytes": 0, "error": ""}
    folder = folder_of(config)
    try:
        return found | {"bytes": sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".jsonl")}
    except (FileNotFoundError, NotADirectoryError):
        return found
    except OSError as error:
        return found | {"error": str(error)}


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
        done = subprocess.run([*systemctl, *words], capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
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
    fix = "" if host["timer"] else "none: lifetimes are held while something of ours runs, or by skerry doctor --timer"
    _line(host["timer"], "timer", fix or "every minute")
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
