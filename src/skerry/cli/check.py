"""`skerry check`: the conformance suite of the package, against a provider on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import provider_names
from skerry.cli.output import json_option, print_json

if TYPE_CHECKING:
    from skerry.providers.base import Provider


@click.command()
@click.argument("provider", shell_complete=provider_names)
@click.option("--image", metavar="NAME", help="What its boxes are made of, where it has images; one with a shell.")
@click.option("--runtime", metavar="NAME", help="The OCI runtime, such as runsc.")
@json_option
def command(provider: str, image: str | None, runtime: str | None, as_json: bool) -> int:
    """Run the conformance suite against a provider on this machine."""
    from skerry.config import load

    asyncio.run(_can_run(load().load_provider(provider)))
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


async def _can_run(provider: Provider) -> None:
    """Where it cannot run at all that is said once, and not by every test."""
    try:
        await provider.check()
    finally:
        await provider.aclose()


def _pytest(provider: str) -> list[str]:
    """The suite on its own: no configuration, cache or conftest of the folder that we happen to be in."""
    alone = ["-c", os.devnull, "--rootdir", os.sep, "-p", "no:cacheprovider", "-o", "anyio_mode=auto"]
    suite = ["--pyargs", "skerry.testing.conformance", "--skerry-provider", provider]
    return [sys.executable, "-m", "pytest", *alone, *suite]


def _summary(report: Path) -> dict[str, Any]:
    from xml.etree import ElementTree

    if not report.exists():
        return {"tests": 0, "failed": [], "skipped": []}
    cases = list(ElementTree.parse(report).iter("testcase"))
    return {
        "tests": len(cases),
        "failed": [_told(case, part) for case in cases for part in case if part.tag in ("failure", "error")],
        "skipped": [_told(case, part) for case in cases for part in case if part.tag == "skipped"],
    }


def _told(case: Any, part: Any) -> dict[str, str]:
    return {"test": case.get("name", ""), "message": part.get("message", "")}
