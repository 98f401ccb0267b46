"""`skerry run`: a command in a sandbox of its own, as if it ran here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import command_options, duration, make_spec, refuse_what_cannot_run, spec_options
from skerry.cli.output import json_option, say, spinner, warn_of_network

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.manager import AsyncSandboxManager
    from skerry.records import Cause
    from skerry.sandbox import AsyncSandbox
    from skerry.spec import SandboxId, Spec


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Exit codes: the command's own; 124 timeout, 125 skerry failed, 126 cannot run, 127 no such command.",
)
@command_options
@spec_options
@click.option("--rm/--keep", "remove", default=True, help="Remove the sandbox at the end (default), or keep it.")
@click.option("--pool", is_flag=True, help="Take a warm sandbox of `skerry pool run`, if there is one.")
@json_option
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    timeout: str | None,
    remove: bool,
    pool: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a command in a new sandbox.

    Without a COMMAND and with -t, the box's shell. Options end at the first word that is none.
    """
    refuse_what_cannot_run(argv, tty, as_json)
    config, spec = make_spec(options)
    from skerry.cli.running import Job, run_joined

    warn_of_network(spec.network)
    job = Job(
        argv=argv or None,
        stdin=interactive or tty,
        tty=tty,
        timeout_s=duration(timeout, "--timeout"),
        as_json=as_json,
    )
    return run_joined(job, _new_sandbox(config, spec, keep=not remove, pool=pool))


_LOOKS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 0.0)


@asynccontextmanager
async def _new_sandbox(config: Config, spec: Spec, *, keep: bool, pool: bool) -> AsyncIterator[AsyncSandbox]:
    """A sandbox that goes with us, however we go, unless it is to be kept."""
    from skerry.errors import AgentUnreachable, CallInterrupted
    from skerry.lifecycle import run_to_end
    from skerry.manager import AsyncSandboxManager
    from skerry.warm import claim_or_create

    async with AsyncSandboxManager(config, reconcile=False) as manager:
        async with spinner("starting a sandbox"):
            if pool:
                sandbox = await claim_or_create(manager, spec, ephemeral=not keep)
            else:
                sandbox = await manager.create(spec, ephemeral=not keep)
        try:
            yield sandbox
        except BaseExceptionGroup as group:
            if group.subgroup((CallInterrupted, AgentUnreachable)) is None:
                raise
            cause = await _cause_of_end(manager, sandbox.id)
            if cause is None:
                raise
            raise AgentUnreachable(f"the sandbox ended before its command did: {cause}") from group
        finally:
            if keep:
                say(f"kept sandbox {sandbox.id}")
            else:
                await run_to_end(_remove(sandbox))


async def _remove(sandbox: AsyncSandbox) -> None:
    async with spinner("removing the sandbox"):
        await sandbox.destroy()


async def _cause_of_end(manager: AsyncSandboxManager, id: SandboxId) -> Cause | None:
    """Why it ended, if it did: a box whose stream is closed may take a moment more to be gone."""
    import asyncio

    for wait_s in _LOOKS_S:
        record = await manager.look_after(id)
        if record.cause is not None:
            return record.cause
        await asyncio.sleep(wait_s)
    return None
