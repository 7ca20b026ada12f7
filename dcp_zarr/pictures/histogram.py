"""How values spread: bars over bins."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.display import count
from dcp_zarr.pictures.picture import MARGIN, Picture, box, drawn, text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_WIDTH, _HEIGHT = 340, 130
_LEFT, _TOP = 64, 56
_LOOK = 'fill="#2a8a8c"'
_TICKS = 4


def histogram(
    edges: ArrayLike, counts: ArrayLike, title: str, *, note: str = "", is_log: bool = False
) -> Picture:
    """Draw how many values are in each bin.

    Parameters
    ----------
    edges
        Ends of the bins, one more than there are bins.
    counts
        Values in each bin.
    title
        What the values are.
    note
        What else to say, such as how many are NaN.
    is_log
        Whether equal steps upwards are equal factors.
    """
    edges, counts = np.asarray(edges, float), np.asarray(counts)
    low, high = (float(edges[0]), float(edges[-1])) if edges.size else (0.0, 0.0)
    heights = np.log10(1.0 + counts) if is_log else np.asarray(counts, float)
    most = max(float(heights.max(initial=0.0)), 1e-9)
    bottom = _TOP + _HEIGHT
    share = (edges - low) / (high - low) if high > low else np.linspace(0.4, 0.6, edges.size)
    places = _LEFT + share * _WIDTH
    parts = [text(MARGIN, 40, note)] if note else []
    for tick in _upward(most, is_log=is_log):
        y = bottom - (log10(1 + tick) if is_log else tick) / most * _HEIGHT
        parts.append(box(_LEFT, y, _WIDTH, 1, 'fill-opacity=".15"'))
        parts.append(text(_LEFT - 6, y + 4, count(tick), anchor="end"))
    for n, tall in enumerate(heights / most * _HEIGHT):
        if counts[n]:
            tall = max(float(tall), 1.0)
            tip = f"{edges[n]:.4g} to {edges[n + 1]:.4g}: {int(counts[n])}"
            wide = max(places[n + 1] - places[n] - 0.5, 0.5)
            parts.append(box(places[n], bottom - tall, wide, tall, _LOOK, tip))
    for tick in ticks(low, high):
        x = _LEFT + ((tick - low) / (high - low) if high > low else 0.5) * _WIDTH
        parts.append(box(x, bottom, 1, 4, 'fill-opacity=".5"'))
        parts.append(text(x, bottom + 17, f"{tick:.4g}", anchor="middle"))
    return drawn(title, _LEFT + _WIDTH + 24, bottom + 28, parts)


def _upward(most: float, *, is_log: bool) -> list[float]:
    if not is_log:
        return [tick for tick in ticks(0.0, most) if tick == round(tick)]
    step = max(ceil(most / _TICKS), 1)
    return [10.0**power for power in range(0, floor(most) + 1, step)]


def ticks(low: float, high: float) -> list[float]:
    """Return some round numbers from `low` to `high`.

    Examples
    --------
    >>> ticks(-0.8, 1.7)
    [-0.5, 0.0, 0.5, 1.0, 1.5]
    """
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = power * next(n for n in (1, 2, 5, 10) if n * power >= 0.8 * rough)
    return [n * step for n in range(ceil(low / step), floor(high / step) + 1)]
