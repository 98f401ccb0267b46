"""`skerry config`."""

from __future__ import annotations

import click

from skerry.cli.output import json_option, print_json, print_table


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show every setting and where it came from."""
    from skerry.config import load

    config = load()
    for name in config.providers:
        config.load_provider(name)  # only the provider can tell whether its settings are right
    values = config.values()
    if as_json:
        print_json({key: {"value": value, "origin": config.origins[key]} for key, value in values.items()})
    else:
        print_table(
            ("KEY", "VALUE", "ORIGIN"), [(key, str(value), config.origins[key]) for key, value in values.items()]
        )
