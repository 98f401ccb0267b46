"""The options that say what a sandbox should be, for every command that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.completion import provider_names

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.spec import Spec

_OPTIONS = (
    click.option("-e", "--env", multiple=True, metavar="K=V|K", help="A variable, or one of yours by its name."),
    click.option("-w", "--workdir", "cwd", metavar="DIR", help="The folder in the box to start in."),
    click.option("-u", "--user", metavar="USER", help="A user name, UID or UID:GID of the box."),
    click.option("-v", "--volume", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Show a path of the host."),
    click.option("--memory", metavar="SIZE", help="For all processes together, e.g. 512M."),
    click.option("--cpus", type=float, metavar="N", help="E.g. 0.5 or 2."),
    click.option("--pids", type=int, metavar="N", help="Processes and threads at once."),
    click.option("--disk", metavar="SIZE", help="What the box may write, e.g. 1G."),
    click.option("--network", metavar="MODE", help="none (default), or what the provider has besides."),
    click.option("--lifetime", metavar="TIME", help="When it ends by itself, e.g. 2h, or never."),
    click.option("--idle", metavar="TIME", help="How long it may idle before it ends by itself."),
    click.option("--provider", metavar="NAME", shell_complete=provider_names, help="What makes the box."),
    click.option("--root", type=click.Path(resolve_path=True), metavar="DIR", help="A folder that is the box's /."),
    click.option("--image", metavar="NAME", help="The image that the box is made from."),
    click.option("--name", metavar="NAME", help="A name for people."),
    click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; can be given again."),
    click.option("--project", metavar="NAME", help="What it belongs to."),
)
_SETTINGS = ("provider", "project", "lifetime", "idle")


def spec_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of a spec to a command; they arrive as keywords for `make_spec`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_spec(options: dict[str, Any]) -> tuple[Config, Spec]:
    """The configuration with these flags in it, and the spec that both make."""
    from skerry.config import load
    from skerry.spec import Spec

    config = load({key: options.pop(key) for key in _SETTINGS})
    fields = {key: value for key, value in options.items() if value not in (None, ())}
    fields["env"] = _environment(options["env"])
    fields["labels"] = dict(_pair(text, "--label") for text in options["labels"])
    return config, config.complete(Spec.of(**fields, provider=config.provider, project=config.project))


def _environment(given: Iterable[str]) -> dict[str, str]:
    """`K=V` as it stands, and `K` with our own value, or left out if we have none."""
    from skerry.config import variable

    found = (tuple(text.split("=", 1)) if "=" in text else (text, variable(text)) for text in given)
    return {name: value for name, value in found if value is not None}


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{flag} {text!r} is not KEY=VALUE", click.get_current_context())
    return key, value
