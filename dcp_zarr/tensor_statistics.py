"""What the values of a tensor are like: streamed, in bounded memory, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from math import nan, prod, sqrt
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcp_zarr import engine
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.region import Grid, Region, coordinates
from dcp_zarr.tasks import Limits, in_order
from dcp_zarr.value_sums import BLOCK_ELEMENTS, ValueSums, joined, sums_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.schema import TensorEntry

_BOX_BYTES = 8 << 20
"""Read and summed up at once, by one thread."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """What the values of one tensor are like; complex ones by their absolute values.

    `min` to `std`, `norm` and `abs_max` are those of the finite values; NaN where there is none.
    """

    fqn: str
    """Fully qualified name."""
    dtype: str
    """Torch dtype, without ``torch.``."""
    shape: tuple[int, ...]
    """Shape."""
    count: int
    """Number of elements."""
    nans: int
    """How many are NaN."""
    infs: int
    """How many are infinite."""
    zeros: int
    """How many are zero."""
    min: float
    """The least."""
    max: float
    """The largest."""
    mean: float
    """Their mean."""
    std: float
    """Their standard deviation (of the population)."""
    norm: float
    """The square root of the sum of their squares."""
    abs_max: float
    """The largest absolute value."""
    abs_max_at: tuple[int, ...] | None
    """Where it is: its first place in C order."""


def statistics(
    entries: Sequence[TensorEntry], source: Source, limits: Limits, *, stored: bool = True
) -> Iterator[TensorStatistics]:
    """Yield what the values of tensors are like, in order.

    Parameters
    ----------
    entries
        The tensors.
    source
        Where they are.
    limits
        Threads; each has one box of a tensor in memory.
    stored
        Read no tensor whose statistics are stored.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    known = [entry.sums if stored else None for entry in entries]
    unread = [entry for entry, sums in zip(entries, known, strict=True) if sums is None]
    tasks = ((entry, box) for entry in unread for box in boxes(entry))
    read = summed(tasks, partial(_sums_of, source=source), _joined, limits)
    for entry, sums in zip(entries, known, strict=True):
        yield _finished(entry, next(read)[1] if sums is None else sums)


Item = TypeVar("Item")
Sums = TypeVar("Sums")


def summed(
    tasks: Iterable[tuple[Item, Region]],
    sum_up: Callable[[tuple[Item, Region]], Sums],
    join: Callable[[Sums, Sums], Sums],
    limits: Limits,
) -> Iterator[tuple[Item, Sums]]:
    """Join what is known of the boxes of each item, which stand together; in order."""
    parts = in_order(tasks, sum_up, limits.thread_count)
    for _, together in groupby(parts, key=lambda part: id(part[0][0])):
        (item, _), sums = reduce(lambda one, more: (one[0], join(one[1], more[1])), together)
        yield item, sums


def boxes(
    entry: TensorEntry, region: Region | None = None, *, nbytes: int | None = None
) -> Iterator[Region]:
    """Cut a tensor, or a region of it, along its read chunks; one empty box where it is empty.

    Parameters
    ----------
    entry
        The tensor.
    region
        The region; all by default.
    nbytes
        Wanted bytes of a box; 8 MiB by default. It holds one read chunk at least.
    """
    array, most = entry.array, nbytes or _BOX_BYTES
    region = region or Region.whole(array.shape)
    if not region.volume:
        yield region
        return
    shape = list(array.read_chunk_shape)
    for axis in reversed(range(len(shape))):
        others = prod(shape) // shape[axis] * array.itemsize
        fitting = max(most // (others * shape[axis]), 1)
        shape[axis] = min(shape[axis] * fitting, max(array.shape[axis], shape[axis]))
        if shape[axis] < array.shape[axis]:
            break
    grid = Grid(array.shape, tuple(shape))
    for position in coordinates(grid.touched(region)):
        yield grid.box(position).intersection(region)


def _joined(first: ValueSums, second: ValueSums) -> ValueSums:
    return joined([first, second])


def _sums_of(task: tuple[TensorEntry, Region], source: Source) -> ValueSums:
    entry, box = task
    return sums_of(read_bits(entry, source, box), entry.dtype, box, entry.array.shape)


def read_bits(
    entry: TensorEntry, source: Source, box: Region, limits: Limits | None = None
) -> NDArray[Any]:
    """Return the bits of the values in a box of a tensor, read by this thread if not told others.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    out = np.empty(box.sizes, entry.dtype.bits)
    job = engine.ReadJob(entry.array, entry.codec, box, out)
    list(engine.read([job], source, limits or Limits(0)))
    return out


def read_box(
    entry: TensorEntry, source: Source, box: Region, limits: Limits | None = None
) -> NDArray[Any]:
    """Return the values in a box of a tensor, in one row; complex32 as complex64.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    dtype = dtype_of(entry.dtype.torch_name)  # not that of integers that hold its bits
    values = dtype.values(read_bits(entry, source, box, limits))
    if dtype.trailing:
        values = values.astype(np.float32).view(np.complex64)
    return values.reshape(-1)


def read_blocks(
    tensors: Iterable[tuple[TensorEntry, Source]], box: Region
) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield the values in a box of some tensors, block by block, side by side.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    rows = [read_box(entry, source, box) for entry, source in tensors]
    for start in range(0, rows[0].size, BLOCK_ELEMENTS):
        yield tuple(row[start : start + BLOCK_ELEMENTS] for row in rows)


@np.errstate(invalid="ignore", over="ignore")
def as_float64(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers as float64; complex ones as their absolute values."""
    if np.issubdtype(values.dtype, np.complexfloating):
        values = np.abs(values)
    return np.asarray(values, np.float64)


def inner_product(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the sum of products, without BLAS: its threads and ours would wait for each other."""
    return float(np.einsum("i,i->", first, second))


def _finished(entry: TensorEntry, sums: ValueSums) -> TensorStatistics:
    known = sums.finite > 0
    at = np.unravel_index(sums.abs_max_at, entry.array.shape) if known else ()
    return TensorStatistics(
        entry.fqn,
        entry.dtype.torch_name,
        entry.array.shape,
        prod(entry.array.shape),
        sums.nans,
        sums.infs,
        sums.zeros,
        sums.min if known else nan,
        sums.max if known else nan,
        sums.mean if known else nan,
        sqrt(sums.squares / sums.finite) if known else nan,
        sqrt(sums.squares + sums.finite * sums.mean * sums.mean) if known else nan,
        sums.abs_max if known else nan,
        tuple(map(int, at)) if known else None,
    )
