"""`skerry token`: who may call the server, and what they may do."""

from __future__ import annotations

import datetime
import os
import time
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.keeper import with_keeper
from skerry.cli.options import words
from skerry.cli.output import age, json_option, print_json, print_list, print_one, say
from skerry.cli.registry import for_each, print_results
from skerry.units import parse_duration

if TYPE_CHECKING:
    from skerry.model.tenants import Token

_HEADER = ("ID", "TENANT", "SCOPES", "EXPIRES", "CREATED", "USED", "NOTE")
_SCOPES = (
    "sandbox:read", "sandbox:create", "sandbox:exec", "sandbox:files", "sandbox:destroy", "sandbox:network",
    "port:open", "image:write", "webhook:write", "token:write", "admin",
)  # fmt: skip
"""A test holds them to `Scope`."""


@click.group()
def token() -> None:
    """Make, list and revoke the tokens by which others call `skerry serve`."""


@token.command()
@click.option("--tenant", metavar="NAME", help="The tenant that it sees; without one it sees all of the host.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    type=click.Choice(_SCOPES),
    shell_complete=words(*_SCOPES),
    help="What it may do, e.g. sandbox:read; can be given again. Without any: everything, or what tenants usually may.",
)
@click.option("--expires", metavar="TIME", help="How long it is good, e.g. 30d; for ever if left out.")
@click.option("--note", default="", metavar="TEXT", help="What it is for.")
@click.option("--e2b", is_flag=True, help="In the form of E2B's keys, which its older clients insist on.")
@json_option
def create(
    tenant: str | None, scopes: tuple[str, ...], expires: str | None, note: str, e2b: bool, as_json: bool
) -> None:
    """Make a token and print it. It is shown this once, and kept nowhere."""
    from skerry.model.tenants import Scope

    lifetime_s = None if expires is None else parse_duration(expires, "--expires")
    granted = tuple(Scope(each) for each in scopes) or None
    issued = with_keeper(
        lambda keeper: keeper.issue(
            tenant=tenant, scopes=granted, lifetime_s=lifetime_s, note=note, created_by=f"uid:{os.getuid()}", e2b=e2b
        )
    )
    print_one(as_json, {"token": issued.text, **_data(issued.token)}, issued.text)
    if not as_json:
        whose = f"of {tenant}" if tenant is not None else "of all of the host"
        say(f"token {issued.token.id}, {whose}: keep it now, it is not shown again")


@token.command("ls")
@click.option("--tenant", metavar="NAME", help="Only those of this tenant.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@json_option
def list_tokens(tenant: str | None, quiet: bool, as_json: bool) -> None:
    """List the tokens, without what makes them ones."""
    tokens = with_keeper(lambda keeper: keeper.tokens(tenant))
    if as_json:
        print_json([_data(each) for each in tokens])
    else:
        print_list(tokens, _HEADER, _row, as_json=False, quiet=quiet)


@token.command("rm")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@json_option
def remove_tokens(ids: tuple[str, ...], as_json: bool) -> int:
    """Revoke tokens: servers refuse them within seconds."""
    results = with_keeper(lambda keeper: for_each(ids, keeper.revoke, at_once=1))
    return print_results(results, as_json)


def _data(token: Token) -> dict[str, Any]:
    """A token for JSON."""
    return {
        "id": token.id,
        "tenant": token.tenant,
        "scopes": [str(scope) for scope in token.scopes],
        "note": token.note,
        "created_at": token.created_at,
        "created_by": token.created_by,
        "expires_at": token.expires_at,
        "last_used_at": token.last_used_at,
    }


def _row(token: Token) -> tuple[str, ...]:
    expires = "never"
    if token.expires_at is not None:
        moment = datetime.datetime.fromtimestamp(token.expires_at).astimezone()
        expires = "expired" if token.is_over(time.time()) else moment.isoformat(sep=" ", timespec="minutes")[:16]
    used = "never" if token.last_used_at is None else f"{age(token.last_used_at)} ago"
    made = f"{age(token.created_at)} ago"
    return token.id, token.tenant or "", ",".join(token.scopes), expires, made, used, token.note
