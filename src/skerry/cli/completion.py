"""`skerry completion`."""

from __future__ import annotations

import click


def provider_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The installed providers, for a shell to complete."""
    from skerry import providers

    return [name for name in providers.names() if name.startswith(incomplete)]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for a shell.

    For bash: eval "$(skerry completion bash)"
    """
    from click.shell_completion import get_completion_class

    from skerry.cli import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "skerry", "_SKERRY_COMPLETE").source())
