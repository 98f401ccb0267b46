"""`skerry network`: what sandboxes may reach, seen and changed while they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from skerry.cli.options import (
    live_records,
    refuse_if,
    rule_sets,
    rules_option,
    sandbox_argument,
    set_names,
    split_rules,
)
from skerry.cli.output import json_option, print_list, print_one, to_data
from skerry.cli.registry import with_sandbox

if TYPE_CHECKING:
    from skerry.sandbox.network import AsyncSandboxNetwork, NetworkRules
    from skerry.sandbox.sandbox import AsyncSandbox


def _secret_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of the sandbox's secrets."""
    sandbox = ctx.params.get("sandbox") or ""
    meant = [record for record in live_records() if record.name == sandbox or record.id.startswith(sandbox)]
    return sorted(name for record in meant for name in record.spec.secrets if name.startswith(incomplete))


_rules_argument = click.argument("rules", nargs=-1, required=True, metavar="RULE...", shell_complete=set_names)


@click.group()
def network() -> None:
    """Show and change what sandboxes may reach.

    A RULE is a name (pypi.org), all names below one (*.pythonhosted.org), an address or a network (10.1.0.0/16), each
    with :PORT if it is not for 80 and 443, or the name of a set (python). What is denied is refused whatever allows it.
    Only a sandbox that was made with rules, or with --network rules, can be given some.
    """


@network.command()
@sandbox_argument
@json_option
def show(sandbox: str, as_json: bool) -> None:
    """Show what a sandbox may reach."""
    _print(sandbox, as_json, lambda network: network.show())


@network.command()
@sandbox_argument
@_rules_argument
@json_option
def allow(sandbox: str, rules: tuple[str, ...], as_json: bool) -> None:
    """Let a sandbox reach more, from now on."""
    _print(sandbox, as_json, lambda network: network.allow(*_given(rules)))


@network.command()
@sandbox_argument
@_rules_argument
@json_option
def deny(sandbox: str, rules: tuple[str, ...], as_json: bool) -> None:
    """Let a sandbox reach less, from now on.

    Connections that are forbidden now have ended when this returns.
    """
    _print(sandbox, as_json, lambda network: network.deny(*_given(rules)))


@network.command("set")
@sandbox_argument
@rules_option("--allow", help="All that is allowed from now on; '' is nothing.")
@rules_option("--deny", help="All that is denied from now on; '' is nothing.")
@json_option
def set_rules(sandbox: str, allow: tuple[str, ...], deny: tuple[str, ...], as_json: bool) -> None:
    """Replace the rules of a sandbox.

    What is not given stays as it is: without --deny, all that is denied.
    """
    refuse_if(not allow and not deny, "say what is allowed (--allow) or denied (--deny) from now on; '' is nothing")
    allowed, denied = (split_rules(each) if each else None for each in (allow, deny))
    _print(sandbox, as_json, lambda network: network.set(allow=allowed, deny=denied))


@network.command()
@sandbox_argument
@click.argument("names", nargs=-1, required=True, metavar="SECRET...", shell_complete=_secret_names)
@json_option
def provide(sandbox: str, names: tuple[str, ...], as_json: bool) -> None:
    """Give secrets of a sandbox new values, from your environment.

    The variable is the one that the secret was made with. The next request has the new value.
    """
    from skerry.gate.secrets import from_environment

    async def work(opened: AsyncSandbox) -> NetworkRules:
        known = {name: secret for name, secret in opened.spec.secrets.items() if name in names}
        await opened.network.provide({**dict.fromkeys(names, ""), **from_environment(known)})
        return await opened.network.show()

    print_one(as_json, {"provided": names, **to_data(with_sandbox(sandbox, work))}, *names)


@network.command("sets")
@json_option
def list_sets(as_json: bool) -> None:
    """List the named sets of rules."""
    sets = rule_sets()
    if as_json:
        print_one(True, sets)
    else:
        print_list(sorted(sets), ("NAME", "RULES"), lambda name: (name, ", ".join(sets[name])), as_json=False)


def _given(rules: tuple[str, ...]) -> list[str]:
    found = split_rules(rules)
    refuse_if(not found, "no rule is given: write a name, such as pypi.org, or a set, see `skerry network sets`")
    return found


def _print(reference: str, as_json: bool, act: Callable[[AsyncSandboxNetwork], Awaitable[NetworkRules]]) -> None:
    rules = with_sandbox(reference, lambda sandbox: act(sandbox.network))
    lines = [f"network  {rules.network}"]
    lines += [f"{word:<7}  {rule}" for word in ("allow", "deny", "reach") for rule in getattr(rules, word)]
    lines += [f"secret   {name}: {', '.join(hosts)}" for name, hosts in rules.secrets.items()]
    print_one(as_json, rules, *lines)
