"""`skerry cache`: what the tools of a project have fetched and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from skerry.cli.completion import cache_names
from skerry.cli.output import json_option
from skerry.cli.volume import provider_option, tell

if TYPE_CHECKING:
    from skerry.cli.registry import Result
    from skerry.manager import AsyncSandboxManager
    from skerry.providers.base import Volume

_project_option = click.option("--project", metavar="NAME", help="Only those of this project.")


@click.group()
def command() -> None:
    """List and remove the caches that the sandboxes of a project share."""


@command.command()
@click.option("-q", "--quiet", is_flag=True, help="Only the names of their volumes.")
@_project_option
@provider_option
@json_option
def ls(quiet: bool, project: str | None, provider: str | None, as_json: bool) -> None:
    """List the caches and their sizes."""
    from skerry.cli.registry import with_manager

    async def find(manager: AsyncSandboxManager) -> list[Volume]:
        return await _find(manager, project, provider, sizes=not quiet)

    tell(with_manager(find), quiet, as_json)


@command.command()
@click.argument("tools", nargs=-1, metavar="[TOOL...]", shell_complete=cache_names)
@click.option("--all", "every", is_flag=True, help="Those of all tools.")
@_project_option
@provider_option
@json_option
def rm(tools: tuple[str, ...], every: bool, project: str | None, provider: str | None, as_json: bool) -> int:
    """Remove caches that no sandbox uses.

    A TOOL is pip, npm, cargo and the like, or the name of a cache of the project's own. Without --project it is meant
    in all projects.
    """
    if bool(tools) == every:
        raise click.UsageError("name the tools whose caches shall go, or use --all", click.get_current_context())
    from skerry.cli.registry import tell_each, with_manager

    async def remove(manager: AsyncSandboxManager) -> list[Result]:
        return await _remove(manager, await _find(manager, project, provider), tools, provider)

    return tell_each(with_manager(remove), as_json)


async def _find(
    manager: AsyncSandboxManager, project: str | None, provider: str | None, *, sizes: bool = False
) -> list[Volume]:
    """Those of this registry: another one's on the same engine are not ours to remove."""
    caches = await manager.volumes("cache", sizes=sizes, provider=provider)
    ours = ("", manager.store.instance)
    return [each for each in caches if each.instance in ours and project in (None, each.project)]


async def _remove(
    manager: AsyncSandboxManager, caches: list[Volume], tools: tuple[str, ...], provider: str | None
) -> list[Result]:
    from skerry.cli.registry import Result, for_each
    from skerry.errors import NotFound

    known = {each.label for each in caches}
    missing = [
        Result(tool, error=NotFound(f"there is no cache of {tool!r}; `skerry cache ls` lists those there are"))
        for tool in tools
        if tool not in known
    ]
    names = [each.name for each in caches if not tools or each.label in tools]
    return [*missing, *await for_each(names, lambda name: manager.remove_volume(name, provider))]
