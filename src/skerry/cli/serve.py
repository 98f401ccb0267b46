"""`skerry serve`: the server, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec

from skerry import log
from skerry.agent.guest import users
from skerry.cli.options import load_config
from skerry.cli.output import say
from skerry.cli.terminal import on_signals
from skerry.config import Config, variable
from skerry.errors import SkerryError

if TYPE_CHECKING:
    from skerry.surfaces.server.server import Server

    Serve = Callable[[Server, asyncio.Event], Coroutine[Any, Any, None]]
_SIGN_IN_S = 12 * 3600.0


@click.command()
@click.option("--listen", multiple=True, metavar="ADDRESS:PORT", help="Where to listen; 127.0.0.1:7357 if left out.")
@click.option("--socket", metavar="PATH", help="The unix socket; `off` for none.")
@click.option("--expose", is_flag=True, help="Listen also on addresses that other machines reach. Needs TLS.")
@click.option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its key, PEM.")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="A name by which clients may call the server.")
@click.option("--e2b/--no-e2b", "e2b", default=None, help="Serve E2B's clients, as is done by default.")
@click.option(
    "--e2b-listen", multiple=True, metavar="ADDRESS:PORT", help="Where, for E2B's clients; 127.0.0.1:7358 if left out."
)
@click.option("--e2b-domain", metavar="NAME", help="Serve them by TLS below this name too: api.NAME, 49983-ID.NAME.")
@click.option("--no-link", is_flag=True, help="Print no link with a token for the page.")
def serve(no_link: bool, **flags: Any) -> int:
    """Serve sandboxes to other programs and machines: REST, WebSocket, MCP and a page.

    On the unix socket callers are known by their uid, root and the server's own user may do everything. Everybody else
    needs a token: `skerry token create`. SIGTERM and Ctrl-C let calls come to their end, a second one does not, and
    sandboxes live on; SIGHUP has the settings read again.
    """
    try:
        from skerry.surfaces.server.listen import run
        from skerry.surfaces.server.observe import begin_tracing
        from skerry.surfaces.server.server import Server
    except ModuleNotFoundError as error:
        fix = "pip install 'skerry[server]', or ./skerry in a checkout"
        raise click.ClickException(f"the package {error.name!r} is missing: {fix}") from None
    given = {name: value for name, value in flags.items() if value or (value is False and name == "e2b")}

    def read() -> Config:
        config = load_config()
        is_told = config.origins["log"] != "default"
        log.configure(config.log if is_told else "warning", as_json=config.server.log_json)
        config.origins.update({f"server.{name}": "the command line" for name in given})
        return msgspec.structs.replace(config, tool="server", server=msgspec.structs.replace(config.server, **given))

    users.allow_many_files()
    begin_tracing()
    context = click.get_current_context()
    return asyncio.run(_Serving(Server, run, lambda: _in(context, read)).run(link=not no_link))


def _in(context: click.Context, read: Callable[[], Config]) -> Config:
    with context.scope(cleanup=False):  # what was said on the command line holds for as long as we run
        return read()


class _Serving:
    """A server of this process, and what signals do to it: the first that ends it has it let calls come to their end,
    the second ends it at once, and SIGHUP has it read its settings again."""

    def __init__(self, server: type[Server], serve: Serve, read: Callable[[], Config]) -> None:
        self._kind = server
        self._serve = serve
        self._read = read
        self._task: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._ended_by: list[int] = []
        self._reloading: set[asyncio.Task[None]] = set()

    async def run(self, *, link: bool) -> int:
        """Serve until a signal; the exit code."""
        self._task = asyncio.create_task(self._run(link))
        with on_signals(self._on_signal):
            try:
                await self._task
            except asyncio.CancelledError:
                if not self._ended_by:
                    raise
        return 0 if len(self._ended_by) < 2 else 128 + self._ended_by[-1]

    async def _run(self, link: bool) -> None:
        async with self._kind.open(self._read()) as server:
            ready = asyncio.Event()
            welcome = asyncio.create_task(self._when_ready(server, ready, link))
            try:
                await self._serve(server, ready)
            finally:
                welcome.cancel()
                tell_systemd("STOPPING=1")

    async def _when_ready(self, server: Server, ready: asyncio.Event, link: bool) -> None:
        await ready.wait()
        self._server = server
        try:
            await _welcome(server, link=link)
        except SkerryError as error:
            say(f"there is no link to the page: {error}")
        tell_systemd("READY=1")

    def _on_signal(self, number: int) -> None:
        # a terminal that is closed sends SIGHUP too
        if number == signal.SIGHUP and not (sys.stderr and sys.stderr.isatty()):
            if self._server is not None:
                task = asyncio.create_task(self._reload(self._server))
                self._reloading.add(task)
                task.add_done_callback(self._reloading.discard)
            return
        self._ended_by.append(number)
        assert self._task is not None
        self._task.cancel()

    async def _reload(self, server: Server) -> None:
        try:
            await server.reload(self._read())
        except SkerryError as error:
            say(f"the settings stay as they were: {error}")


def tell_systemd(state: str) -> None:
    """Tell systemd how we are, if it has started us and wants to know."""
    address = variable("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock, suppress(OSError):
        sock.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


async def _welcome(server: Server, *, link: bool) -> None:
    """Say where the server is, and how to sign in to its page. Raises StoreError and LedgerError."""
    settings = server.config.server
    scheme = "https" if settings.tls_cert else "http"
    token = ""
    if link:
        issued = await server.access.issue(lifetime_s=_SIGN_IN_S, note="link of skerry serve", created_by="serve")
        token = f"#token={issued.text}"  # after the #, so that no server and no log ever sees it
    for address in settings.listen:
        say(f"serving on {scheme}://{address}/{token}")
    for address in server.e2b_addresses:
        say(f"serving E2B's clients on {scheme}://{address}/: `skerry e2b env` has what to set")
    if server.e2b_refused:
        say(f"E2B's clients are not served: {server.e2b_refused}; give another address with --e2b-listen, or --no-e2b")
