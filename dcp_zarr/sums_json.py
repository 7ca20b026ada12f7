"""What the values of a tensor come to, as strict JSON: the member ``statistics`` of its entry."""

from __future__ import annotations

from math import inf, isfinite, prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.value_sums import ValueSums

if TYPE_CHECKING:
    from dcp_zarr.canonical_json import Json
    from dcp_zarr.region import Shape

_NUMBERS = ("min", "max", "mean", "squares")


def sums_to_json(sums: ValueSums, shape: Shape) -> dict[str, Json]:
    """Return sums as JSON; null is what nothing finite has, and a sum beyond float64.

    Examples
    --------
    >>> sums_to_json(ValueSums(2, 1, 0, 0, -1.0, 3.0, 1.0, 8.0, 2), (3, 1))["abs_max_at"]
    [2, 0]
    """
    described: dict[str, Json] = {name: getattr(sums, name) for name in ("nans", "infs", "zeros")}
    for name in _NUMBERS:
        number = getattr(sums, name)
        described[name] = number if sums.finite and isfinite(number) else None
    at = np.unravel_index(sums.abs_max_at, shape) if sums.finite else None
    described["abs_max_at"] = None if at is None else [int(position) for position in at]
    return described


def sums_from_json(value: Json, shape: Shape) -> ValueSums:
    """Read what `sums_to_json` wrote of a tensor of that shape.

    Raises
    ------
    ValueError, TypeError, LookupError, ArithmeticError
        If no values of a tensor of that shape come to this.
    """
    nans, infs, zeros = (_count(value[name]) for name in ("nans", "infs", "zeros"))
    finite = prod(shape) - nans - infs
    if finite < zeros:
        raise ValueError(f"statistics of more values than a tensor of shape {shape} has")
    at = value["abs_max_at"]
    if not finite:
        if any(value[name] is not None for name in (*_NUMBERS, "abs_max_at")):
            raise ValueError("statistics of finite values where there is none")
        return ValueSums(0, nans, infs)
    least, largest, mean = (_number(value[name]) for name in _NUMBERS[:3])
    squares = inf if value["squares"] is None else _number(value["squares"])
    if least > largest or squares < 0 or len(at) != len(shape):
        raise ValueError(f"statistics {value!r:.200} that no values have")
    place = 0
    for position, length in zip(map(_count, at), shape, strict=True):
        if position >= length:
            raise ValueError(f"largest value at {at!r:.80}, outside shape {shape}")
        place = place * length + position
    return ValueSums(finite, nans, infs, zeros, least, largest, mean, squares, place)


def _count(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is no number of values")
    return value


def _number(value: Json) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise TypeError(f"{value!r:.40} is no finite number")
    return float(value)
