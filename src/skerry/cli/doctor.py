"""`skerry doctor`: what works on this machine, and the one line that mends what does not."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.errors import OURS
from skerry.cli.output import echo, json_option, print_json, spinner

if TYPE_CHECKING:
    from skerry.config import Config

_DEADLINE_S = 20.0


@click.command()
@json_option
def command(as_json: bool) -> int:
    """Tell what works on this machine, and how to get the rest."""
    from skerry.config import load

    config = load()
    providers = asyncio.run(_examine_all(config))
    works = any(each["name"] == config.provider and each["available"] for each in providers)
    findings = {"ok": works, "default_provider": config.provider, "host": _host(config), "providers": providers}
    if as_json:
        print_json(findings)
    else:
        _print(findings)
    return 0 if works else OURS


async def _examine_all(config: Config) -> list[dict[str, Any]]:
    from skerry import providers

    async with spinner("looking at the providers"), asyncio.TaskGroup() as group:
        names = sorted({*providers.names(), config.provider})  # a default that nobody knows is a finding too
        tasks = [group.create_task(_examine(config, name)) for name in names]
    return [task.result() for task in tasks]


async def _examine(config: Config, name: str) -> dict[str, Any]:
    """One provider's state. A provider that breaks is a finding, not the end of the doctor."""
    from skerry.errors import ProviderUnavailable

    found: dict[str, Any] = {"name": name, "available": False, "reason": "", "fix": ""}
    try:
        async with asyncio.timeout(_DEADLINE_S):
            found |= await _ask(config, name)
    except ProviderUnavailable as error:
        found |= {"reason": error.reason, "fix": error.fix}
    except TimeoutError:
        found |= {"reason": f"it did not answer within {_DEADLINE_S:g} s"}
    except Exception as error:
        found |= {"reason": str(error) or type(error).__name__}
    return found


async def _ask(config: Config, name: str) -> dict[str, Any]:
    provider = config.load_provider(name)
    try:
        await provider.check()
        details = await provider.describe()
    finally:
        await provider.aclose()
    return {
        "available": True,
        "isolation": provider.isolation.name.lower(),
        "capabilities": sorted(provider.capabilities),
        "details": {field: {"by": how.by, "why_not": how.why_not} for field, how in details.items()},
    }


def _host(config: Config) -> dict[str, Any]:
    state = Path(config.state_dir)
    nearest = next(folder for folder in (state, *state.parents) if os.path.exists(folder))
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernel": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "cgroup": _cgroup_version(),
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "state_dir": str(state),
        "state_dir_writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        "disk_free_bytes": shutil.disk_usage(nearest).free,
    }


def _cgroup_version() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "v2"
    return "v1" if Path("/sys/fs/cgroup/memory").exists() else "none"


def _print(findings: dict[str, Any]) -> None:
    from skerry.units import format_size

    host = findings["host"]
    free = host["disk_free_bytes"]
    _line(True, "host", f"{host['kernel']}, Python {host['python']}, cgroup {host['cgroup']}, as {host['user']}")
    fix = "" if host["state_dir_writable"] else "not writable: mkdir -p it, or set SKERRY_STATE_DIR; "
    _line(host["state_dir_writable"], "state", f"{host['state_dir']}: {fix}{format_size(free)} free")
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


def _line(good: bool, name: str, text: str) -> None:
    mark = click.style("ok", fg="green") if good else click.style("--", fg="red")
    echo(f"{mark}  {name:<18}  {text}")
