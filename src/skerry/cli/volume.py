"""`skerry volume` and `skerry cache`: data that outlives a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from skerry.cli.options import cache_names, project_filter, provider_filter, refuse_if, volume_names
from skerry.cli.output import SHORT_ID, age, json_option, print_list
from skerry.cli.registry import Result, change_each, for_each, list_each, print_listed, print_results, with_manager
from skerry.errors import NotFound
from skerry.units import format_size

if TYPE_CHECKING:
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.providers.base import Volume

_HEADER = ("NAME", "KIND", "PROJECT", "OF", "SIZE", "IN USE", "CREATED")


@click.group()
def volume() -> None:
    """List and remove volumes: the data of sandboxes, and the caches of projects."""


@volume.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("-s", "--size", "sizes", is_flag=True, help="Tell their sizes, which takes longer.")
@provider_filter
@json_option
def list_volumes(quiet: bool, sizes: bool, provider: str | None, as_json: bool) -> int:
    """List the volumes.

    Where a provider does not answer, those of the others are listed, and the exit code is 125; with --json an object
    with its name and its error comes after them.
    """
    listed = with_manager(lambda manager: _volumes(manager, None, provider, sizes=sizes), doing="asking the providers")
    return _print(listed, quiet, as_json)


@volume.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="VOLUME...", shell_complete=volume_names)
@provider_filter
@json_option
def remove_volumes(names: tuple[str, ...], provider: str | None, as_json: bool) -> int:
    """Remove volumes that no sandbox uses, and all that is in them."""
    return change_each(names, as_json, "removing", lambda manager, name: manager.remove_volume(name, provider))


@click.group()
def cache() -> None:
    """List and remove the caches that the sandboxes of a project share."""


@cache.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Only the names of their volumes.")
@project_filter
@provider_filter
@json_option
def list_caches(quiet: bool, project: str | None, provider: str | None, as_json: bool) -> int:
    """List the caches and their sizes; a provider that does not answer is told as `skerry volume ls` does."""
    listed = with_manager(lambda manager: _caches(manager, project, provider, sizes=not quiet))
    return _print(listed, quiet, as_json)


@cache.command("rm")
@click.argument("tools", nargs=-1, metavar="[TOOL...]", shell_complete=cache_names)
@click.option("--all", "every", is_flag=True, help="Those of all tools.")
@project_filter
@provider_filter
@json_option
def remove_caches(tools: tuple[str, ...], every: bool, project: str | None, provider: str | None, as_json: bool) -> int:
    """Remove caches that no sandbox uses.

    A TOOL is pip, npm, cargo and the like, or the name of a cache of the project's own. Without --project it is meant
    in all projects.
    """
    refuse_if(bool(tools) == every, "name the tools whose caches shall go, or use --all")

    async def remove(manager: AsyncSandboxManager) -> list[Result]:
        caches, failed = await _caches(manager, project, provider)
        known = {each.label for each in caches}
        missing = [
            Result(tool, error=NotFound(f"there is no cache of {tool!r}; `skerry cache ls` lists those there are"))
            for tool in tools
            if tool not in known
        ]
        names = [each.name for each in caches if not tools or each.label in tools]
        return [*failed, *missing, *await for_each(names, lambda name: manager.remove_volume(name, provider))]

    return print_results(with_manager(remove), as_json)


async def _volumes(
    manager: AsyncSandboxManager, kind: str | None, provider: str | None, *, sizes: bool
) -> tuple[list[Volume], list[Result]]:
    """Volumes of all that answer, and the providers that do not."""

    async def of(name: str) -> list[Volume]:
        return await manager.volumes(kind, sizes=sizes, provider=name)

    return await list_each(manager, "volumes", provider, of, lambda volume: volume.name)


async def _caches(
    manager: AsyncSandboxManager, project: str | None, provider: str | None, *, sizes: bool = False
) -> tuple[list[Volume], list[Result]]:
    """Caches of this registry: another one's on the same engine are not ours to remove."""
    caches, failed = await _volumes(manager, "cache", provider, sizes=sizes)
    return [each for each in caches if manager.owns(each) and project in (None, each.project)], failed


def _print(listed: tuple[list[Volume], list[Result]], quiet: bool, as_json: bool) -> int:
    def show(volumes: Sequence[Volume]) -> None:
        print_list(volumes, _HEADER, _row, as_json=False, quiet=quiet, name=lambda each: each.name)

    return print_listed(listed, as_json, show)


def _row(volume: Volume) -> tuple[str, ...]:
    of = volume.label or (volume.sandbox or "")[:SHORT_ID]
    size = "" if volume.size is None else format_size(volume.size)
    created = "" if volume.created_at is None else f"{age(volume.created_at)} ago"
    return volume.name, volume.kind, volume.project, of, size, "yes" if volume.in_use else "", created
