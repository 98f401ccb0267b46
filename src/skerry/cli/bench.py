"""`skerry bench`: how fast sandboxes are on this machine, and how many it holds."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import load_config, provider_names
from skerry.cli.output import json_option, print_json, print_table, say, show_progress, to_data
from skerry.cli.registry import open_manager, refuse_server
from skerry.version import __version__

if TYPE_CHECKING:
    from skerry.config import Config
    from skerry.measure.figures import Figure
    from skerry.model.spec import Spec

_HEADER = ("WHAT", "MEASURED", "BESIDE", "RATIO", "")
_LIFETIME_S = 3600.0
_BUSY = 0.5
"""Load for each processor from which on figures are rough."""


@click.command()
@click.option("--provider", metavar="NAME", shell_complete=provider_names, help="What is measured; else the default.")
@click.option("--image", metavar="NAME", help="What its boxes are made of, where it has images; one with a shell.")
@click.option("--quick", is_flag=True, help="Fewer rounds: rougher, in a few seconds.")
@json_option
def bench(provider: str | None, image: str | None, quick: bool, as_json: bool) -> int:
    """Measure sandboxes on this machine, beside the least that it needs for the same.

    Create, exec, files, many at once, pause, resume and fork where the provider has them, and the memory of an idle
    sandbox. Ratios compare machines better than milliseconds do. It leaves nothing, also after Ctrl-C.
    """
    from skerry.cli.terminal import run_until_signal
    from skerry.model.spec import Spec

    config = load_config()
    refuse_server(config, "`skerry bench`")
    spec = Spec(provider=provider or config.provider, image=image, lifetime_s=_LIFETIME_S)
    load = os.getloadavg()[0]
    if load > _BUSY * (os.cpu_count() or 1):
        say(f"this machine is busy with other work (load {load:.1f}): read the figures as rough")
    figures: list[Figure] = []
    code = run_until_signal(_measure(config, spec, quick, as_json, figures))
    if code:
        return code
    if as_json:
        print_json({"host": _host(load), "provider": spec.provider, "quick": quick, "figures": to_data(figures)})
    else:
        print_table(_HEADER, [_row(each) for each in figures])
    return 0


async def _measure(config: Config, spec: Spec, quick: bool, as_json: bool, into: list[Figure]) -> None:
    from skerry.measure import sandboxes

    with show_progress("measuring", as_json) as on_progress:
        async with open_manager(config) as manager:
            into += await sandboxes.measure(manager, spec, quick=quick, on_progress=on_progress)


def _host(load: float) -> dict[str, Any]:
    return {
        "skerry": __version__,
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "cpus": os.cpu_count(),
        "load": load,
    }


def _row(figure: Figure) -> tuple[str, ...]:
    value = f"{figure.value:.2f} x" if figure.unit == "x" else ""
    return figure.what, figure.measured, figure.limit, value, figure.note
