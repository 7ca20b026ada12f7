"""Colours for numbers: in perceived order, readable for colour-blind people too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, log, sqrt
from statistics import median

from dcp_zarr.pictures.picture import MARGIN, box, text

# viridis, by Nathaniel Smith and Stéfan van der Walt (CC0).
_ANCHORS = [
    (68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142),
    (31, 158, 137), (53, 183, 121), (110, 206, 88), (181, 222, 43), (253, 231, 37),
]  # fmt: skip
BAD = (229, 57, 53)
"""Colour of what is NaN or infinite."""
NOTHING = 'fill-opacity=".12"'
"""How a cell looks that has no number."""
_LOG_FROM = 15
"""A scale is logarithmic where the largest number is so many times the median."""
_LOG_RANGE = 1e6
_BAR = 200
_STEPS = 40


def rgb(share: float) -> tuple[int, int, int]:
    """Return the colour at a place from 0 to 1 of the scale.

    Examples
    --------
    >>> rgb(0), rgb(0.5), rgb(1)
    ((68, 1, 84), (34, 144, 140), (253, 231, 37))
    """
    place = min(max(share, 0.0), 1.0) * (len(_ANCHORS) - 1)
    low = min(int(place), len(_ANCHORS) - 2)
    first, second = _ANCHORS[low], _ANCHORS[low + 1]
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True)
    )
    return red, green, blue


def fill(colour: tuple[int, int, int]) -> str:
    """Return a colour as an attribute of SVG."""
    return 'fill="#{:02x}{:02x}{:02x}"'.format(*colour)


@dataclass(frozen=True, slots=True)
class Scale:
    """What numbers the colours stand for."""

    low: float
    """Number of the first colour."""
    high: float
    """Number of the last colour."""
    is_log: bool
    """Whether equal steps of colour are equal factors."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Scale:
        """Return the scale for numbers; logarithmic where few are much larger than most."""
        found = [value for value in values if isfinite(value)]
        low, high = min(found, default=0.0), max(found, default=0.0)
        positive = [value for value in found if value > 0]
        if low < 0 or not positive or high < _LOG_FROM * median(positive):
            return cls(low, high, is_log=False)
        return cls(max(min(positive), high / _LOG_RANGE), high, is_log=True)

    def share(self, value: float) -> float:
        """Return the place from 0 to 1 of a number."""
        if self.high <= self.low:
            return 0.5
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        return log(value / self.low) / log(self.high / self.low) if value > self.low else 0.0

    def fill(self, value: float) -> str:
        """Return the colour of a number as an attribute of SVG."""
        return fill(rgb(self.share(value)))

    def legend(self, y: float, *, has_bad: bool, has_nothing: bool) -> tuple[float, str]:
        """Draw the scale, 30 pixels high; return where it ends on the right, and the SVG."""
        step = _BAR / _STEPS
        parts = [
            box(MARGIN + number * step, y, step + 0.5, 10, fill(rgb(number / (_STEPS - 1))))
            for number in range(_STEPS)
        ]
        middle = sqrt(self.low) * sqrt(self.high) if self.is_log else self.low / 2 + self.high / 2
        marks = [(0.0, self.low, "start"), (0.5, middle, "middle"), (1.0, self.high, "end")]
        for share, value, anchor in marks if self.high > self.low else marks[1:2]:
            parts.append(text(MARGIN + share * _BAR, y + 23, f"{value:.3g}", anchor=anchor))
        x = MARGIN + _BAR + 24.0
        if self.is_log:
            parts.append(text(x, y + 10, "logarithmic"))
            x += 88
        for wanted, look, word in [
            (has_bad, fill(BAD), "NaN or infinite"),
            (has_nothing, NOTHING, "no number"),
        ]:
            if wanted:
                parts.append(box(x, y, 14, 10, look) + text(x + 20, y + 10, word))
                x += 130
        return x, "".join(parts)
