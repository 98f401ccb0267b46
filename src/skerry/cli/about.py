"""`skerry version`, `config` and `completion`: the installation itself."""

from __future__ import annotations

import os
import sys

import click

from skerry.cli.output import json_option, print_json, print_table
from skerry.version import __version__


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the version."""
    system = os.uname()
    python = ".".join(str(part) for part in sys.version_info[:3])
    platform = f"{system.sysname} {system.release} {system.machine}"
    if as_json:
        print_json({"version": __version__, "python": python, "platform": platform})
    else:
        click.echo(f"skerry {__version__} (Python {python}, {platform})")


@click.command()
@json_option
def config(as_json: bool) -> None:
    """Show every setting and where it came from."""
    from skerry.cli.options import load_config

    settings = load_config()
    for name in settings.providers:
        settings.load_provider(name)  # only the provider can tell whether its settings are right
    values, origins = settings.values(), settings.origins
    if as_json:
        print_json({key: {"value": value, "origin": origins[key]} for key, value in values.items()})
    else:
        print_table(("KEY", "VALUE", "ORIGIN"), [(key, str(value), origins[key]) for key, value in values.items()])


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    For bash: eval "$(skerry completion bash)"
    """
    from click.shell_completion import get_completion_class

    from skerry.cli import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "skerry", "_SKERRY_COMPLETE").source())
