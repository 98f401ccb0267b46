"""`skerry tenant`: projects that others use over the server, and what they may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.keeper import Keeper, with_keeper
from skerry.cli.options import all_of, refuse_if
from skerry.cli.output import age, json_option, print_json, print_list, print_one
from skerry.units import format_size, parse_size

if TYPE_CHECKING:
    from skerry.model.tenants import Quota, Tenant
    from skerry.store.documents import Document

_HEADER = ("NAME", "SANDBOXES", "CPUS", "MEMORY", "DISK", "EGRESS", "CREATED", "NOTE")
_NO_BOUND = "none"
_SIZES = ("memory", "disk", "egress")


def _bound(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Reader of a bound, which `none` takes away."""

    def convert(_ctx: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        if value is None or value == _NO_BOUND:
            return value
        try:
            return read(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is no number, nor `none`", param=parameter) from None

    return convert


_quota_options = all_of(
    click.option("--sandboxes", metavar="N", callback=_bound(int), help="Sandboxes at once; `none` is any number."),
    click.option("--cpus", metavar="N", callback=_bound(float), help="Of all its sandboxes together."),
    click.option(
        "--memory", metavar="SIZE", callback=_bound(lambda text: parse_size(text, "--memory")), help="E.g. 16G."
    ),
    click.option("--disk", metavar="SIZE", callback=_bound(lambda text: parse_size(text, "--disk")), help="E.g. 100G."),
    click.option(
        "--egress",
        metavar="SIZE",
        callback=_bound(lambda text: parse_size(text, "--egress")),
        help="Bytes a second out through the rules of their networks, e.g. 50M.",
    ),
)
"""Bounds of a quota; they arrive as keywords for `_quota`."""


@click.group()
def tenant() -> None:
    """Make, list, change and remove tenants of `skerry serve`.

    A tenant is a project with tokens of its own, which see nothing else, and with a quota for all its sandboxes
    together. `skerry token create --tenant NAME` makes its tokens.
    """


@tenant.command()
@click.argument("name", metavar="NAME")
@_quota_options
@click.option("--note", default="", metavar="TEXT", help="Who it is.")
@json_option
def add(name: str, note: str, as_json: bool, **bounds: Any) -> None:
    """Make a tenant. Sandboxes of a project of that name are its own from then on."""
    from skerry.model.tenants import Quota, Tenant

    made = Tenant(name=name, quota=_quota(Quota(), bounds), note=note)
    _print_one(with_keeper(lambda keeper: keeper.add_tenant(made)), as_json)


@tenant.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@json_option
def list_tenants(quiet: bool, as_json: bool) -> None:
    """List the tenants and their quotas."""
    found = with_keeper(lambda keeper: keeper.tenants())
    if as_json:
        print_json([_data(each) for each in found])
    else:
        print_list(found, _HEADER, _row, as_json=False, quiet=quiet)


@tenant.command("set")
@click.argument("name", metavar="NAME")
@_quota_options
@click.option("--note", metavar="TEXT", help="Who it is.")
@json_option
def change(name: str, note: str | None, as_json: bool, **bounds: Any) -> None:
    """Change the quota of a tenant; what is not said stays. Sandboxes that it has already it keeps."""
    refuse_if(note is None and all(value is None for value in bounds.values()), "say what of it to change")

    async def work(keeper: Keeper) -> Document[Tenant]:
        before = await keeper.tenant(name)
        return await keeper.set_quota(name, _quota(before.body.quota, bounds), note=note, version=before.version)

    _print_one(with_keeper(work), as_json)


@tenant.command("rm")
@click.argument("name", metavar="NAME")
@click.option("--destroy", is_flag=True, help="End its sandboxes too; without this, a tenant that has any is kept.")
@json_option
def remove(name: str, destroy: bool, as_json: bool) -> None:
    """Remove a tenant with its tokens and webhooks. Its volumes and snapshots are kept."""
    with_keeper(lambda keeper: keeper.end_tenant(name, destroy=destroy))
    print_one(as_json, {"name": name}, name)


def _quota(before: Quota, bounds: dict[str, Any]) -> Quota:
    """A quota with other bounds."""
    import msgspec

    given = {field: None if value == _NO_BOUND else value for field, value in bounds.items() if value is not None}
    return msgspec.structs.replace(before, **given)


def _data(tenant: Document[Tenant]) -> dict[str, Any]:
    """A tenant for JSON; a bound that is null is none."""
    quota = tenant.body.quota
    return {
        "name": tenant.id,
        "quota": {field: getattr(quota, field) for field in quota.__struct_fields__},
        "note": tenant.body.note,
        "created_at": tenant.body.created_at,
    }


def _row(tenant: Document[Tenant]) -> tuple[str, ...]:
    bounds = []
    for field in tenant.body.quota.__struct_fields__:
        value = getattr(tenant.body.quota, field)
        bounds.append("" if value is None else format_size(value) if field in _SIZES else f"{value:g}")
    return tenant.id, *bounds, f"{age(tenant.body.created_at)} ago", tenant.body.note


def _print_one(tenant: Document[Tenant], as_json: bool) -> None:
    print_one(as_json, _data(tenant), tenant.id)
