"""A tensor of any size in few numbers: the largest absolute value of each part. Streamed."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.tasks import Limits, in_order
from dcp_zarr.tensor_statistics import as_float64, boxes, read_box
from dcp_zarr.value_sums import BLOCK_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.region import Region
    from dcp_zarr.schema import TensorEntry

MAX_CELLS = 256
"""Most cells on a side."""
Pooled = tuple["NDArray[np.intp]", "NDArray[np.intp]", "NDArray[np.float64]"]


def pooled(entry: TensorEntry, source: Source, limits: Limits) -> NDArray[np.float64]:
    """Return the largest absolute value in each cell of a grid over a tensor.

    Its first axis is rows, all others are columns together; without a second axis it is one row.
    A cell is NaN where it holds one.

    Parameters
    ----------
    entry
        The tensor.
    source
        Where it is.
    limits
        Threads; each has one box of the tensor in memory.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    shape = entry.array.shape
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    steps = -(-max(rows, 1) // MAX_CELLS), -(-max(columns, 1) // MAX_CELLS)
    cells = np.zeros((-(-rows // steps[0]), -(-columns // steps[1])))
    if not cells.size:
        return cells
    work = partial(_pool_box, entry, source, steps)
    for _, (rows_at, columns_at, found) in in_order(boxes(entry), work, limits.thread_count):
        place = np.ix_(rows_at, columns_at)
        cells[place] = np.maximum(cells[place], found)
    return cells


@np.errstate(invalid="ignore")
def _pool_box(entry: TensorEntry, source: Source, steps: tuple[int, int], box: Region) -> Pooled:
    """Return cells that a box touches, as rows and columns, and what of it is largest there."""
    rows, columns = _places(entry.array.shape, box)
    values = read_box(entry, source, box).reshape(rows.size, columns.size)
    columns_at, column_starts = np.unique(columns // steps[1], return_index=True)
    rows_at, row_of = np.unique(rows // steps[0], return_inverse=True)
    found = np.zeros((rows_at.size, columns_at.size))
    at_once = max(BLOCK_ELEMENTS // columns.size, 1)
    for start in range(0, rows.size, at_once):
        block = np.abs(as_float64(values[start : start + at_once]))
        largest = np.maximum.reduceat(block, column_starts, axis=1)
        np.maximum.at(found, row_of[start : start + at_once], largest)
    return rows_at, columns_at, found


def _places(shape: tuple[int, ...], box: Region) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows and columns of the values in a box; both rise."""
    slices = box.slices()
    if len(shape) < 2:  # noqa: PLR2004
        return np.zeros(1, np.intp), np.arange(*(slices[0].indices(shape[0]) if shape else (1,)))
    others = np.ix_(*(np.arange(s.start, s.stop) for s in slices[1:]))
    columns = np.ravel_multi_index(others, shape[1:])
    return np.arange(slices[0].start, slices[0].stop), np.asarray(columns).reshape(-1)
