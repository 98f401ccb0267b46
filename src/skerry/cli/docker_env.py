"""`skerry docker-env`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import click

from skerry.cli.completion import provider_names
from skerry.cli.output import echo, json_option, print_json


@runtime_checkable
class _HasDocker(Protocol):
    async def docker_host(self, project_name: str, *, start: bool = False) -> str: ...


@click.command()
@click.argument("project")
@click.option("--start", is_flag=True, help="Start the machine if it is off.")
@click.option(
    "--provider", default="vmdocker", metavar="NAME", show_default=True, shell_complete=provider_names,
    help="Whose machines have Docker in them.",
)  # fmt: skip
@json_option
def command(project: str, start: bool, provider: str, as_json: bool) -> None:
    """Print the address of the Docker in a project's machine, for the docker command.

    `eval "$(skerry docker-env PROJECT)"` makes the docker command speak with it. What you leave there keeps the disk
    of the machine.
    """
    import asyncio

    address = asyncio.run(_address(provider, project, start))
    if as_json:
        print_json({"project": project, "docker_host": address})
    else:
        import shlex

        echo(f"export DOCKER_HOST={shlex.quote(address)}")


async def _address(name: str, project: str, start: bool) -> str:
    from skerry.config import load
    from skerry.errors import Unsupported

    provider = load().load_provider(name)
    try:
        if not isinstance(provider, _HasDocker):
            raise Unsupported("docker-env", name, "its sandboxes share no Docker of a project's own; use vmdocker")
        return await provider.docker_host(project, start=start)
    finally:
        await provider.aclose()
