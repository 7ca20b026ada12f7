"""What is to be read into a tensor: straight, or in parts that are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcp_zarr import engine, tensors
from dcp_zarr.region import Grid, Region, coordinates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.schema import TensorEntry

_COPY_BYTES = 32 << 20
"""What is read at once where bits cannot go straight into the destination."""


def target_jobs(
    entry: TensorEntry, region: Region, target: torch.Tensor, done: Callable[[], None]
) -> Iterator[engine.ReadJob]:
    """Yield the jobs that fill a target tensor; the key of each is to be called when it is read.

    Bits go straight into a CPU tensor of the saved dtype. For any other, they are read in slabs
    and copied.
    """
    if tensors.writes_in_place(target, entry.dtype):
        yield engine.ReadJob(entry.array, entry.codec, region, tensors.bits(target), key=done)
        return
    slabs = list(_slabs(region, entry.array.itemsize))
    for number, slab in enumerate(slabs, start=1):
        out = np.empty(slab.sizes, entry.dtype.bits)
        part = target[slab.index(region.offsets)]
        finish = done if number == len(slabs) else _nothing
        yield engine.ReadJob(
            entry.array,
            entry.codec,
            slab,
            out,
            key=_copy(out, part, entry.dtype.torch_name, finish),
        )


def _slabs(region: Region, itemsize: int) -> Iterator[Region]:
    """Cut a region along its first long axis into slabs of about `_COPY_BYTES`."""
    if not region.volume or not region.sizes:
        yield region
        return
    axis = next((a for a, n in enumerate(region.sizes) if n > 1), 0)
    row = region.volume // region.sizes[axis] * itemsize
    step = (*region.sizes[:axis], max(_COPY_BYTES // row, 1), *region.sizes[axis + 1 :])
    grid = Grid(region.sizes, step)
    for position in coordinates(Region.whole(grid.counts)):
        box = grid.box(position)
        offsets = tuple(b + o for b, o in zip(region.offsets, box.offsets, strict=True))
        yield Region(offsets, box.sizes)


def _copy(
    out: NDArray[Any], part: torch.Tensor, name: str, done: Callable[[], None]
) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            part.copy_(tensors.from_bits(out, name))
        done()

    return copy


def _nothing() -> None:
    """Do nothing: more of the same target is to come."""
