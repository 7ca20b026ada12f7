"""Sums over the values of a tensor, part by part: counted exactly, added in float64.

Knows bits and dtypes; no containers, and no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcp_zarr.dtypes import dtype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.dtypes import DType
    from dcp_zarr.region import Region, Shape

BLOCK_ELEMENTS = 1 << 15
"""Elements that are summed up at once: a core's cache holds their copies."""
_ROW = 1 << 13
"""Elements of a dot product: of longer ones OpenBLAS makes threads of its own."""
_NOWHERE = np.iinfo(np.int64).max
_MOST_MEAN = 0.9
"""Part of the sum of squares up to which the mean is subtracted from it without loss."""


RECORD = np.dtype(
    [(name, "<i8") for name in ("finite", "nans", "infs", "zeros")]
    + [(name, "<f8") for name in ("min", "max", "mean", "squares")]
    + [("abs_max_at", "<i8")]
)
"""The fields of `ValueSums` as bytes."""


class ValueSums(NamedTuple):
    """What is known of a part of a tensor; complex values count by their absolute values.

    `min` to `squares` are those of the finite values, and mean nothing where there is none.
    """

    finite: int = 0
    """How many are finite."""
    nans: int = 0
    """How many are NaN."""
    infs: int = 0
    """How many are infinite."""
    zeros: int = 0
    """How many are zero."""
    min: float = inf
    """The least."""
    max: float = -inf
    """The largest."""
    mean: float = 0.0
    """Their mean."""
    squares: float = 0.0
    """Sum of squared distances from the mean; infinite where float64 ends."""
    abs_max_at: int = -1
    """The first place of the largest absolute value, in C order of the whole tensor."""

    @property
    def abs_max(self) -> float:
        """The largest absolute value."""
        return max(-self.min, self.max)


def joined(parts: Sequence[ValueSums]) -> ValueSums:
    """Join the sums of some parts of a tensor; places are in the same order in all."""
    if len(parts) == 1:
        return parts[0]
    return ValueSums(*join(np.array(parts, RECORD), [0])[0].item())


@np.errstate(over="ignore")
def join(parts: NDArray[Any], starts: Sequence[int]) -> NDArray[Any]:
    """Join sums group by group.

    Parameters
    ----------
    parts
        Sums as `RECORD`, those of a group together.
    starts
        Where each group begins, ascending; none is empty.
    """
    whole = np.empty(len(starts), RECORD)
    for name in ("finite", "nans", "infs", "zeros"):
        whole[name] = np.add.reduceat(parts[name], starts)
    whole["min"] = np.minimum.reduceat(parts["min"], starts)
    whole["max"] = np.maximum.reduceat(parts["max"], starts)
    sizes = np.diff([*starts, len(parts)])

    def of_group(values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, sizes)

    weights = parts["finite"] / of_group(np.maximum(whole["finite"], 1))
    whole["mean"] = np.add.reduceat(weights * parts["mean"], starts)
    apart = np.where(parts["finite"] > 0, parts["mean"] - of_group(whole["mean"]), 0.0)
    squares = parts["squares"] + parts["finite"] * apart * apart
    whole["squares"] = np.add.reduceat(squares, starts)
    abs_max = np.maximum(-parts["min"], parts["max"])
    largest = of_group(np.maximum.reduceat(abs_max, starts))
    is_there = (abs_max == largest) & (parts["abs_max_at"] >= 0)
    places = np.where(is_there, parts["abs_max_at"], _NOWHERE)
    at = np.minimum.reduceat(places, starts)
    whole["abs_max_at"] = np.where(at == _NOWHERE, -1, at)
    return whole


@np.errstate(invalid="ignore", over="ignore")
def sums_of(bits: NDArray[Any], dtype: DType, box: Region, shape: Shape) -> ValueSums:
    """Sum up the values in a box of a tensor.

    Parameters
    ----------
    bits
        Their bits, of shape ``box.sizes``.
    dtype
        What they are.
    box
        Where they are.
    shape
        Of the tensor.
    """
    row = bits.reshape(-1)
    blocks = [row[at : at + BLOCK_ELEMENTS] for at in range(0, row.size, BLOCK_ELEMENTS)]
    if not blocks:
        return ValueSums()
    parts = [_sums_of_block(floats(block, dtype)) for block in blocks]
    sums = joined(parts)
    if not sums.finite:
        return sums
    number = [part.abs_max for part in parts].index(sums.abs_max)
    is_largest = np.abs(floats(blocks[number], dtype)) == sums.abs_max
    inside = np.unravel_index(number * BLOCK_ELEMENTS + int(is_largest.argmax()), box.sizes)
    place = 0
    for position, offset, length in zip(inside, box.offsets, shape, strict=True):
        place = place * length + int(position) + offset
    return sums._replace(abs_max_at=place)


class SummedValues:
    """Gives values as another function does, and sums up those that it gave; in any thread.

    Parameters
    ----------
    values
        Gives the bits in a box of a tensor; for each box once.
    dtype
        What they are.
    shape
        Of the tensor.
    """

    def __init__(
        self, values: Callable[[Region], NDArray[Any]], dtype: DType, shape: Shape
    ) -> None:
        self._values, self._dtype, self._shape = values, dtype, shape
        self._parts: dict[Shape, ValueSums] = {}

    def __call__(self, box: Region) -> NDArray[Any]:
        """Return the bits in a box, one after the other."""
        bits = np.ascontiguousarray(self._values(box))
        self._parts[box.offsets] = sums_of(bits, self._dtype, box, self._shape)
        return bits

    def sums(self) -> ValueSums:
        """Return the sums of all boxes, whatever thread was first."""
        return joined([self._parts[offsets] for offsets in sorted(self._parts)] or [ValueSums()])


class _Scratch(threading.local):
    """Each thread's memory for a block: fresh memory costs more than a pass over it."""

    def __init__(self) -> None:
        self.narrow = np.empty(BLOCK_ELEMENTS, np.float32)
        self.wide = np.empty(BLOCK_ELEMENTS, np.float64)
        self.flags = np.empty(BLOCK_ELEMENTS, np.bool_)


_scratch = _Scratch()
_ones = np.ones(_ROW)


def floats(bits: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return numbers as float32 where these hold them exactly, else as float64.

    They are valid until this thread's next call.

    Parameters
    ----------
    bits
        The bits of `BLOCK_ELEMENTS` numbers at most, in one row.
    dtype
        What they are, whatever holds them; complex ones come as their absolute values.
    """
    narrow = _scratch.narrow[: bits.size]
    if dtype.torch_name == "bfloat16":
        shifted = narrow.view(np.uint32)
        np.copyto(shifted, bits)
        shifted <<= 16
        return narrow
    dtype = dtype_of(dtype.torch_name)
    if dtype.itemsize == 1:
        single, double = _floats_of_octets(dtype.stored)
        pairs = bits.size // 2
        out = narrow[: 2 * pairs].view(np.float64)
        np.take(double, bits[: 2 * pairs].view(np.uint16), out=out, mode="clip")
        narrow[2 * pairs :] = single[bits[2 * pairs :]]
        return narrow
    values = dtype.values(bits)
    if dtype.trailing:
        values = values.astype(np.float32).view(np.complex64).reshape(-1)
    if values.dtype.kind == "c":
        values = np.abs(values)
    return values.astype(np.result_type(values.dtype, np.float32), copy=False)


@lru_cache
def _floats_of_octets(stored: np.dtype[Any]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return what each pattern of a byte means, and each pair of bytes: two float32 as one item."""
    single = np.arange(256, dtype=np.uint8).view(stored).astype(np.float32)
    octets = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return single, single[octets].view(np.float64)


def _sums_of_block(values: NDArray[Any]) -> ValueSums:
    """Sum up a block of floats; nothing is said of places."""
    nans = infs = zeros = 0
    least, largest = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not (isfinite(least) and isfinite(largest)):
        nans, infs = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
        if not values.size:
            return ValueSums(nans=nans, infs=infs)
        least, largest = float(values.min()), float(values.max())
    if least <= 0 <= largest:
        zeros = int(np.count_nonzero(np.equal(values, 0, out=_scratch.flags[: values.size])))
    low, high = least + 0.0, largest + 0.0  # whichever zero came first, it has no sign
    return ValueSums(values.size, nans, infs, zeros, low, high, *_moments(values))


def _moments(values: NDArray[Any]) -> tuple[float, float]:
    """Return the mean of finite values, and the sum of their squared distances from it."""
    count, width = values.size, min(values.size, _ROW)
    wide = _scratch.wide[: -(-count // width) * width]
    np.copyto(wide[:count], values)
    wide[count:] = 0
    rows = wide.reshape(-1, width)
    total = sum(np.vecdot(rows, _ones[:width]).tolist())
    power = sum(np.vecdot(rows, rows).tolist())
    mean = total / count
    if total * mean <= _MOST_MEAN * power < inf:
        return mean, power - total * mean
    mean = float((wide / count).sum())
    wide -= mean
    wide[count:] = 0
    return mean, sum(np.vecdot(rows, rows).tolist())
