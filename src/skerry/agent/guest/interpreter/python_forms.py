"""Forms of tables and plots for E2B's clients: the columns of a DataFrame, and what a figure of matplotlib is made of,
by the package `e2b_charts` where the box has it. Kernels of Jupyter's run this file, our own imports it."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def columns_of(value: object) -> dict[str, Any] | None:
    """The columns of a DataFrame; None of anything else."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, pandas.DataFrame):
        return None
    columns = value.to_dict(orient="list")
    return {
        str(name): [each.isoformat() if isinstance(each, pandas.Timestamp) else each for each in column]
        for name, column in columns.items()
    }


def chart_of(value: object) -> dict[str, Any] | None:
    """The chart that a figure is; None of anything else, and without that package."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, figures.Figure):
        return None
    try:
        return importlib.import_module("e2b_charts").chart_figure_to_dict(value) or None
    except Exception:  # it is not there, or knows nothing of such a figure
        return None


FORMS = (("e2b/data", columns_of), ("e2b/chart", chart_of))


def teach_jupyter() -> None:
    """Have the kernel that runs this file show these forms too."""
    shell: Any = importlib.import_module("IPython").get_ipython()
    base: Any = importlib.import_module("IPython.core.formatters").BaseFormatter
    text: Any = importlib.import_module("traitlets").Unicode

    def add(media: str, form: Callable[[object], object]) -> None:
        fields = {"format_type": text(media), "__call__": lambda _self, value: form(value)}
        shell.display_formatter.formatters[media] = type("Form", (base,), fields)(parent=shell.display_formatter)

    for media, form in FORMS:
        add(media, form)
