"""`skerry context`: the servers that commands use, known by name."""

from __future__ import annotations

import os
import re
import sys

import click

from skerry.cli.options import refuse_if
from skerry.cli.output import json_option, print_json, print_one, print_table
from skerry.errors import ConfigError, NotFound

HERE = "here"
"""Name of this machine itself, which no server has."""
_HEADER = ("NAME", "USED", "URL", "TOKEN")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def context_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of contexts."""
    from skerry import contexts
    from skerry.config import contexts_path

    try:
        known = contexts.read(contexts_path()).known
    except ConfigError:
        return []
    return [name for name in (HERE, *known) if name.startswith(incomplete)]


@click.group()
def context() -> None:
    """Choose the server that all commands use, of those that are known by name.

    SKERRY_URL and SKERRY_TOKEN go before it. What is done with sandboxes is done on the server then; paths of mounts,
    roots and workspaces are the server's.
    """


@context.command()
@click.argument("name")
@click.argument("url")
@click.option("--token-file", metavar="FILE", help="Where the token is; - is stdin. Else it is asked for.")
@click.option("--no-token", is_flag=True, help="For a unix socket, where the user is enough.")
@click.option("--ca", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Certificates to trust.")
@click.option("--use", is_flag=True, help="Use it from now on.")
@json_option
def add(name: str, url: str, token_file: str | None, no_token: bool, ca: str | None, use: bool, as_json: bool) -> None:
    """Know a server by a name: https://HOST, http://HOST:PORT or unix:///PATH.

    Its token is kept in a file that only you can read.
    """
    from msgspec.structs import replace

    from skerry import contexts
    from skerry.config import contexts_path
    from skerry.remote.api import Api

    refuse_if(name == HERE or not _NAME.fullmatch(name), f"{name!r} cannot be the name of a context")
    refuse_if(no_token and token_file, "--no-token and --token-file exclude each other")
    token = "" if no_token or (url.startswith("unix:") and not token_file) else _token(token_file)
    Api(url, token, ca=ca)  # raises for what is no server's
    path = contexts_path()
    kept = contexts.read(path)
    known = {**kept.known, name: contexts.Context(url=url, token=token, ca=ca or "")}
    contexts.write(path, replace(kept, known=known, current=name if use else kept.current))
    print_one(as_json, {"name": name, "url": url, "used": use or kept.current == name}, name)


@context.command("use")
@click.argument("name", shell_complete=context_names)
@json_option
def use_context(name: str, as_json: bool) -> None:
    """Use a server from now on; `here` is this machine itself."""
    from msgspec.structs import replace

    from skerry import contexts
    from skerry.config import contexts_path

    path = contexts_path()
    kept = contexts.read(path)
    if name != HERE and name not in kept.known:
        raise NotFound(f"no context is called {name!r}; there are {', '.join((HERE, *sorted(kept.known)))}")
    contexts.write(path, replace(kept, current="" if name == HERE else name))
    print_one(as_json, {"name": name, "used": True}, name)


@context.command("ls")
@json_option
def list_contexts(as_json: bool) -> None:
    """List the servers that are known, without their tokens."""
    from skerry import contexts
    from skerry.config import contexts_path

    kept = contexts.read(contexts_path())
    found = [{"name": HERE, "url": "", "used": kept.used is None, "token": False}]
    found += [
        {"name": name, "url": each.url, "used": name == kept.current, "token": bool(each.token)}
        for name, each in sorted(kept.known.items())
    ]
    if as_json:
        print_json(found)
        return
    rows = [
        (str(each["name"]), "*" if each["used"] else "", str(each["url"]), "yes" if each["token"] else "")
        for each in found
    ]
    print_table(_HEADER, rows)


@context.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=context_names)
@json_option
def remove(names: tuple[str, ...], as_json: bool) -> None:
    """Forget servers and their tokens; the tokens stay good until they are revoked."""
    from msgspec.structs import replace

    from skerry import contexts
    from skerry.config import contexts_path

    path = contexts_path()
    kept = contexts.read(path)
    if missing := [name for name in names if name not in kept.known]:
        raise NotFound(f"no context is called {missing[0]!r}")
    known = {name: each for name, each in kept.known.items() if name not in names}
    contexts.write(path, replace(kept, known=known, current=kept.current if kept.current in known else ""))
    print_one(as_json, {"removed": list(names)}, *names)


def _token(file: str | None) -> str:
    """A token from a file or from whoever sits there; never an argument, which all users of a machine see."""
    if file is None:
        if not (sys.stdin and sys.stdin.isatty()):
            raise click.UsageError("the token: pipe it in with --token-file -, or name its file")
        text: str = click.prompt("token", hide_input=True, err=True)
        return text.strip()
    if file == "-":
        return sys.stdin.read().strip()
    try:
        with open(os.path.expanduser(file)) as opened:
            return opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: {error}") from None
