"""A picture of how many times faster than torch's own storage each peer is."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.peers import TORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.one_process import Table

_INK = "#7d8590"  # readable on white and on black
_OURS, _OTHERS = "#2f81f7", "#d2882b"
_LEAST, _MOST = 1 / 16, 16

Ratios = dict[str, float | None]
"""How many times faster than torch each peer is; None for one that is not measured."""


def draw(tables: dict[str, Table], path: Path) -> None:
    """Draw the ratios of all workloads: a column for each, saves above loads."""
    names = [
        name
        for name in next(iter(tables.values()))
        if name != TORCH and not name.startswith("limit") and "statistics" not in name
    ]
    with mpl.rc_context({"font.size": 8, "svg.hashsalt": "dcp_zarr"}):
        size = (3 + 1.6 * len(tables), 0.36 * len(names) + 1)
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(2, len(tables), sharex=True, sharey=True, squeeze=False)
        for act, axes in zip(("save", "load"), rows, strict=True):
            for axis, (workload, table) in zip(axes, tables.items(), strict=True):
                _bars(axis, {name: _ratio(table, name, f"{act}_s") for name in names})
                axis.set_title(f"{workload}, {act}", color=_INK, fontweight="bold")
        rows[0, 0].set_yticks(range(len(names)), names)
        rows[0, 0].invert_yaxis()
        figure.supxlabel(f"times faster than {TORCH} at its defaults", color=_INK, fontsize=8)
        figure.savefig(path, transparent=True, dpi=150)


def _ratio(table: Table, name: str, act: str) -> float | None:
    times = getattr(table[name], act) if name in table else []
    return median(getattr(table[TORCH], act)) / median(times) if times else None


def _bars(axis: Axes, ratios: Ratios) -> None:
    """Draw bars from 1 to each ratio, on a logarithmic axis."""
    ends = [min(max(ratio or 1, _LEAST), _MOST) for ratio in ratios.values()]
    colours = [_OURS if name.startswith("dcp_zarr") else _OTHERS for name in ratios]
    axis.set_xscale("log", base=2)
    axis.barh(range(len(ends)), [end - 1 for end in ends], left=1, color=colours, height=0.7)
    axis.set_xlim(_LEAST / 4, _MOST * 4)  # leaves room for the numbers
    axis.set_xticks([1 / 8, 1, 8], ["1/8", "1", "8"])
    axis.minorticks_off()
    axis.axvline(1, color=_INK, linewidth=0.8)
    axis.grid(axis="x", color=_INK, alpha=0.3, linewidth=0.5)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_INK, length=0)
    axis.spines[:].set_visible(False)
    for row, (ratio, end) in enumerate(zip(ratios.values(), ends, strict=True)):
        axis.annotate(
            f"{ratio:.2g}" if ratio else "not measured",
            (end, row),
            (3 if end >= 1 else -3, 0),
            textcoords="offset points",
            ha="left" if end >= 1 else "right",
            va="center",
            color=_INK,
            fontsize=7,
        )
