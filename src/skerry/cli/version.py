"""`skerry version`."""

from __future__ import annotations

import os
import sys

import click

from skerry.cli.output import json_option, print_json
from skerry.version import __version__


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show the version."""
    system = os.uname()
    python = ".".join(str(part) for part in sys.version_info[:3])
    platform = f"{system.sysname} {system.release} {system.machine}"
    if as_json:
        print_json({"version": __version__, "python": python, "platform": platform})
    else:
        click.echo(f"skerry {__version__} (Python {python}, {platform})")
