"""`skerry port` and `skerry docker-env`: addresses on this machine of what runs in sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol, runtime_checkable

import click

from skerry.cli.options import load_config, provider_names, sandbox_argument
from skerry.cli.output import echo, json_option, print_json_line, print_one
from skerry.cli.registry import open_sandbox, refuse_server
from skerry.cli.terminal import run_until_signal
from skerry.errors import Unsupported


@click.command(epilog="Exit code 130 after Ctrl-C, as with any program that it ends.")
@json_option
@sandbox_argument
@click.argument("ports", nargs=-1, required=True, metavar="[LOCAL:]PORT...")
def port(sandbox: str, ports: tuple[str, ...], as_json: bool) -> int:
    """Open ports of a sandbox on this machine, until Ctrl-C.

    Prints each address; it is any free one unless LOCAL says which. The sandbox needs no network for it. With --json,
    one object a line.
    """
    wanted = [_parse(text) for text in ports]
    return run_until_signal(_serve(sandbox, wanted, as_json))


async def _serve(reference: str, ports: Sequence[tuple[int, int]], as_json: bool) -> None:
    async with open_sandbox(reference) as sandbox:
        await sandbox.ping()
        opened = [(port, await sandbox.expose(port, local)) for local, port in ports]
        for port, address in opened:
            if as_json:
                print_json_line({"port": port, "address": address})
            else:
                echo(f"{address} -> {port}")
        await asyncio.Event().wait()


def _parse(text: str) -> tuple[int, int]:
    """Port here, 0 for any, and port in the sandbox."""
    local, _, port = text.rpartition(":")
    if port.isdecimal() and (local.isdecimal() or not local):
        return int(local or 0), int(port)
    raise click.UsageError(f"{text!r} is not [LOCAL:]PORT", click.get_current_context())


@runtime_checkable
class _HasDocker(Protocol):
    async def docker_host(self, project_name: str, *, start: bool = False) -> str: ...


@click.command("docker-env")
@click.argument("project")
@click.option("--start", is_flag=True, help="Start the machine if it is off.")
@click.option(
    "--provider", default="vmdocker", metavar="NAME", show_default=True, shell_complete=provider_names,
    help="Whose machines have Docker in them.",
)  # fmt: skip
@json_option
def docker_env(project: str, start: bool, provider: str, as_json: bool) -> None:
    """Print the address of the Docker in a project's machine, for the docker command.

    `eval "$(skerry docker-env PROJECT)"` makes the docker command speak with it. What you leave there keeps the disk
    of the machine.
    """
    import shlex

    address = asyncio.run(_docker_host(provider, project, start))
    print_one(as_json, {"project": project, "docker_host": address}, f"export DOCKER_HOST={shlex.quote(address)}")


async def _docker_host(name: str, project: str, start: bool) -> str:
    config = load_config()
    refuse_server(config, "`skerry docker-env`")
    async with aclosing(config.load_provider(name)) as provider:
        if not isinstance(provider, _HasDocker):
            raise Unsupported("docker-env", name, "its sandboxes share no Docker of a project's own; use vmdocker")
        return await provider.docker_host(project, start=start)
