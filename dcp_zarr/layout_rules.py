"""Which read chunks and write chunks a tensor is stored in, and who writes each.

Pure functions of the tilings and the options, so every rank and every later reader of the plan
comes to the same answer. For each tensor the first rule that fits is taken:

1. **Aligned.** Per axis, g is the gcd of all region starts. Read chunks divide g, so that none is
   cut by a region boundary; leading axes are split first, so that a row slice is cheap.
2. **Cut.** Whole rows near the wanted size all the same. Each rank stages its pieces of the read
   chunks that boundaries run through, and the coordinator puts these together. Taken while the
   pieces stay a small part of the tensor and of the save.
3. **Fine.** Aligned, with small read chunks.
4. **Gathered.** Rule 2 without its bounds: always right, and slower than the others. Before it
   spends the save's budget of pieces, rule 3 with read chunks down to 4 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcp_zarr.errors import LayoutError
from dcp_zarr.layout import ArrayLayout, enclosing
from dcp_zarr.region import Region, Tiling

if TYPE_CHECKING:
    from dcp_zarr.dtypes import DType
    from dcp_zarr.region import Shape

READ_CHUNK_BYTES = 1 << 20
"""Default for the wanted size of a read chunk."""
WRITE_CHUNK_BYTES = 256 << 20
"""Default for the largest size of a write chunk."""
MIN_READ_CHUNK_BYTES = 256 << 10
MAX_READ_CHUNK_BYTES = 8 << 20
SMALL_TENSOR_BYTES = 64 << 10
"""A tensor of at most this size with several writers is one cut read chunk."""

_FINE_READ_CHUNK_BYTES = 16 << 10
_SMALLEST_READ_CHUNK_BYTES = 4 << 10
_OWN_OBJECT_BYTES = 4 << 20
"""Regions of this size or more are write chunks of their own; smaller ones share an object."""
_PIECES_PART = 8
"""Pieces may be this fraction of a tensor: one eighth."""


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What a user may say about layouts; all in bytes, uncompressed."""

    read_chunk_bytes: int = READ_CHUNK_BYTES
    """Wanted size of a read chunk."""
    write_chunk_bytes: int = WRITE_CHUNK_BYTES
    """Largest size of a write chunk."""
    pieces_bytes: int = 256 << 20
    """All pieces of a save that rule 2 may make."""
    most_read_chunk_bytes: int = MAX_READ_CHUNK_BYTES
    """Largest size of a read chunk, where the wanted one is no larger."""
    shared_objects: bool = True
    """Whether the container lets several ranks write to one object."""


class _Sizes(NamedTuple):
    """Sizes of read chunks, in bytes."""

    least: int
    wanted: int
    most: int

    @classmethod
    def of(cls, options: LayoutOptions) -> _Sizes:
        wanted = options.read_chunk_bytes
        most = max(options.most_read_chunk_bytes, wanted)
        return cls(min(MIN_READ_CHUNK_BYTES, wanted), wanted, most)


def plan_layouts(
    tilings: Mapping[str, Tiling],
    dtypes: Mapping[str, DType],
    paths: Mapping[str, str],
    options: LayoutOptions,
) -> dict[str, ArrayLayout]:
    """Choose the layout of every tensor of a save.

    Parameters
    ----------
    tilings
        For each FQN, the regions of all ranks.
    dtypes
        For each FQN, how its elements are stored.
    paths
        For each FQN, its path in the container.
    options
        Wanted and largest sizes.

    Raises
    ------
    LayoutError
        If the regions of a tensor do not cover it exactly once.
    """
    layouts = {}
    budget = options.pieces_bytes
    known: dict[tuple[Tiling, int], tuple[Shape, Shape]] = {}
    for fqn, tiling in tilings.items():
        tiling.check(fqn)
        dtype = dtypes[fqn]
        if tiling.is_whole:
            shapes = _whole_tensor(tiling.shape, dtype.itemsize, options)
        elif (tiling, dtype.itemsize) in known:
            shapes = known[tiling, dtype.itemsize]
        else:
            regions = tiling.without_empty()
            read, write, pieces_nbytes = _choose(regions, dtype.itemsize, options, budget)
            shapes = read, write
            budget -= pieces_nbytes
            if not pieces_nbytes:  # then a smaller budget changes nothing
                known[tiling, dtype.itemsize] = shapes
        layouts[fqn] = ArrayLayout(
            fqn, paths[fqn], tiling.shape, dtype.itemsize, *shapes, dtype.trailing
        )
        if not tiling.is_whole:
            check_layout(layouts[fqn], tiling)
    return layouts


@lru_cache(maxsize=4096)
def _whole_tensor(shape: Shape, itemsize: int, options: LayoutOptions) -> tuple[Shape, Shape]:
    """Return the chunk shapes of a tensor that one rank writes."""
    read, write, _ = _choose(Tiling.of(shape, [Region.whole(shape)]), itemsize, options, 0)
    return read, write


def check_layout(array: ArrayLayout, tiling: Tiling) -> None:
    """Prove that no byte of an array has two writers.

    The regions tile the tensor, so each read chunk that lies in one of them has one writer, and
    each other one is the coordinator's. What is left to show: a write chunk of more than one read
    chunk is never shared, unless it is the only one: its writers then keep to their slabs.

    Raises
    ------
    LayoutError
        If a stored object would have two writers.
    """
    ratio = array.read_chunks_per_write_chunk
    multiples = zip(ratio, array.read_chunk_shape, array.write_chunk_shape, strict=True)
    exact = all(k * r == w for k, r, w in multiples)
    several = prod(ratio) > 1 and prod(array.write_grid.counts) > 1
    shared = several and _cut_bytes(tiling.without_empty(), array.write_chunk_shape, 1)
    if not exact or shared:
        raise LayoutError(
            f"Write chunks of {array.write_chunk_shape} of tensor {array.fqn!r} would have several "
            "writers. This is a fault of dcp_zarr: please report it with the tensor's placement.",
            fqn=array.fqn,
        )


def shares_object(array: ArrayLayout, tiling: Tiling) -> bool:
    """Say whether all writers of an array share its one object."""
    indexed = array.read_chunk_shape != array.write_chunk_shape
    return array.has_one_object and indexed and len(tiling.without_empty()) > 1


def _choose(
    tiling: Tiling, itemsize: int, options: LayoutOptions, budget: int
) -> tuple[Shape, Shape, int]:
    """Return both chunk shapes by the first rule that fits, and the bytes of the pieces."""
    shape = tiling.shape
    one = tuple(max(n, 1) for n in shape)
    nbytes = prod(shape) * itemsize
    if not nbytes and prod(one) > options.most_read_chunk_bytes:
        return (1,) * len(shape), (1,) * len(shape), 0
    if len(tiling) > 1 and nbytes <= SMALL_TENSOR_BYTES:
        return one, one, nbytes
    steps = _steps(tiling)
    allowed = _Sizes.of(options)
    if read := _aligned(shape, steps, itemsize, allowed):
        return read, _write_shape(shape, read, steps, itemsize, options), 0
    if found := _cut(tiling, steps, itemsize, options):
        read, pieces_nbytes = found
        if pieces_nbytes <= min(budget, nbytes // _PIECES_PART):
            return read, _cut_write_shape(shape, read, options), pieces_nbytes
    read, pieces_nbytes = found or (one, nbytes)
    # Cells of a few KiB compress badly: taken only where pieces would be too many.
    smallest = [_FINE_READ_CHUNK_BYTES]
    if pieces_nbytes > budget:
        smallest.append(_SMALLEST_READ_CHUNK_BYTES)
    for fine in smallest:
        finer = allowed._replace(least=min(fine, allowed.least))
        fine_read = _aligned(shape, steps, itemsize, finer)
        if fine_read is not None:
            write = _write_shape(shape, fine_read, steps, itemsize, options)
            return fine_read, write, 0
    return read, _cut_write_shape(shape, read, options), pieces_nbytes


def _steps(tiling: Tiling) -> tuple[int | None, ...]:
    """Return the gcd of the region starts on each axis; None where no region cuts the axis."""
    columns = (np.unique(tiling.offsets[:, axis]).tolist() for axis in range(len(tiling.shape)))
    return tuple(gcd(*starts) or None for starts in columns)


def _aligned(
    shape: Shape, steps: tuple[int | None, ...], itemsize: int, allowed: _Sizes
) -> Shape | None:
    """Return a read chunk shape that divides the steps, near the wanted size; None if none does.

    An axis with the step None is split evenly, one with the step 0 anywhere. A cell smaller than
    the least size is taken whole only where it is the whole tensor.
    """
    least, wanted, most = allowed
    cell = [max(step or n, 1) for step, n in zip(steps, shape, strict=True)]
    read = list(cell)
    for axis, step in enumerate(steps):
        rest = prod(read[:axis] + read[axis + 1 :]) * itemsize
        if rest * read[axis] <= wanted:
            break
        read[axis] = (
            min(max(wanted // rest, 1), cell[axis])
            if step == 0
            else _split(cell[axis], free=step is None, allowed=allowed, rest=rest)
        )
        if read[axis] > 1:
            break
    nbytes = prod(read) * itemsize
    fits = least <= nbytes <= most
    whole = not any(steps)
    return tuple(read) if fits or (whole and nbytes <= most) else None


def _split(length: int, *, free: bool, allowed: _Sizes, rest: int) -> int:
    """Return the part of an axis that brings a read chunk nearest to the wanted size.

    `rest` is the bytes of the other axes. A divisor of a cut axis' step is taken; a free axis
    without one within a factor of two is split evenly.
    """
    least, wanted, most = allowed
    target = max(wanted // rest, 1)
    large = [d for d in divisors(length) if d * rest >= least] or [length]
    fitting = [d for d in large if d * rest <= most] or large[:1]
    nearest = min(fitting, key=lambda d: max(d / target, target / d))
    if free and not target <= 2 * nearest <= 4 * target:
        return -(-length // -(-length // target))
    return nearest


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def whole_write_shape(shape: Shape, read: Shape, itemsize: int, options: LayoutOptions) -> Shape:
    """Return the write chunk shape for read chunks of a tensor that one rank writes."""
    return _write_shape(shape, read, (None,) * len(shape), itemsize, options)


def _write_shape(
    shape: Shape,
    read: Shape,
    steps: tuple[int | None, ...],
    itemsize: int,
    options: LayoutOptions,
) -> Shape:
    """Return the largest write chunk shape within a cell of the steps and the allowed bytes.

    Small cells share one write chunk.
    """
    cell = [step or -(-n // r) * r for step, n, r in zip(steps, shape, read, strict=True)]
    if options.shared_objects and any(steps) and prod(cell) * itemsize < _OWN_OBJECT_BYTES:
        return enclosing(shape, read)
    counts = [max(c // r, 1) for c, r in zip(cell, read, strict=True)]
    allowed = max(options.write_chunk_bytes // (prod(read) * itemsize), 1)
    for axis, step in enumerate(steps):
        count, rest = counts[axis], prod(counts[:axis] + counts[axis + 1 :])
        if count * rest <= allowed:
            break
        target = max(allowed // rest, 1)
        even = -(-count // -(-count // target))
        counts[axis] = max(d for d in divisors(count) if d <= target) if step else even
    return tuple(c * r for c, r in zip(counts, read, strict=True))


def _cut_write_shape(shape: Shape, read: Shape, options: LayoutOptions) -> Shape:
    """Return the write chunk shape of a cut tensor: all of it, where it may be shared."""
    return enclosing(shape, read) if options.shared_objects else read


def _cut(
    tiling: Tiling, steps: tuple[int | None, ...], itemsize: int, options: LayoutOptions
) -> tuple[Shape, int] | None:
    """Return whole rows whose pieces are fewest, and the bytes of these; larger chunks first.

    An axis is given up only where it must be: each cut axis alone is tried, then all of them.
    """
    cut_axes = [axis for axis, step in enumerate(steps) if step is not None]
    given_up = [{axis} for axis in cut_axes] + [set(cut_axes)]
    best: tuple[Shape, int] | None = None
    allowed = _Sizes.of(options)
    nbytes = prod(tiling.shape) * itemsize
    while allowed.wanted >= allowed.least:
        for axes in given_up:
            free = tuple(0 if axis in axes else step for axis, step in enumerate(steps))
            read = _aligned(tiling.shape, free, itemsize, allowed)
            if read is None:
                continue
            pieces_nbytes = _cut_bytes(tiling, read, itemsize)
            if best is None or pieces_nbytes < best[1]:
                best = read, pieces_nbytes
        if best is not None and best[1] <= nbytes // _PIECES_PART:
            break
        allowed = allowed._replace(wanted=allowed.wanted // 2)
    return best


def _cut_bytes(tiling: Tiling, step: Shape, itemsize: int) -> int:
    """Return the bytes of the tensor that lie in boxes of a grid that more than one region meets.

    Each region counts what of it lies outside the boxes that it holds whole.
    """
    if not len(tiling):
        return 0
    shape = np.array(tiling.shape, np.int64)
    steps = np.array(step, np.int64)
    starts = -(-tiling.offsets // steps) * steps
    ends = np.where(tiling.ends == shape, shape, tiling.ends // steps * steps)
    inner = np.maximum(ends - starts, 0).prod(axis=1)
    return int((tiling.sizes.prod(axis=1) - inner).sum()) * itemsize
