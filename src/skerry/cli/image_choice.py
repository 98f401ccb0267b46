"""Whose images are meant, and how a command works with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from skerry.cli.completion import provider_names

if TYPE_CHECKING:
    from skerry.manager import AsyncSandboxManager

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def provider_options(command: F) -> F:
    """`--provider NAME`, and `--vm` for any that has machines."""
    vm = click.option("--vm", is_flag=True, help="Images for virtual machines, which all providers of those share.")
    named = click.option(
        "--provider",
        metavar="NAME",
        shell_complete=provider_names,
        help="Whose images; else the configured provider's.",
    )
    return named(vm(command))


def ask(provider: str | None, vm: bool, work: Callable[[AsyncSandboxManager], Awaitable[T]]) -> T:
    """Do something with a manager that opens no registry, as images are not in it."""
    import asyncio

    from skerry.config import load
    from skerry.manager import AsyncSandboxManager

    async def main() -> T:
        config = load({"provider": provider})
        if vm:
            from skerry.images import provider_of_machines

            config = load({"provider": provider_of_machines(config.provider)})
        manager = AsyncSandboxManager(config)
        try:
            return await work(manager)
        finally:
            await manager.aclose()

    return asyncio.run(main())
