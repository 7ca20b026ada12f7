"""Copies values from a container to places in a file: in parallel, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import engine
from dcp_zarr.encoding import flat
from dcp_zarr.local_files import write_all
from dcp_zarr.region import Region, coordinates
from dcp_zarr.tasks import Limits, in_order
from dcp_zarr.tensor_statistics import boxes

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import TensorEntry

_TASK_BOXES = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, or a region of one, and where it goes: its elements in C order, without gaps."""

    entry: TensorEntry
    """The tensor."""
    region: Region
    """The region."""
    start: int
    """Where its first byte goes in the file."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of what goes to a place."""

    of: Placed
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.volume * self.of.entry.array.itemsize


def copy_values(parts: Iterable[Placed], source: Source, fd: int, limits: Limits) -> Iterator[int]:
    """Read values, and write them to their places; yield numbers of bytes as they are written.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    copy = partial(_copy, source=source, fd=fd)
    for _, nbytes in in_order(_tasks(parts, limits.task_bytes), copy, limits.thread_count):
        yield nbytes


def _tasks(parts: Iterable[Placed], task_bytes: int) -> Iterator[list[_Box]]:
    """Cut what follows each other in a file into what a thread copies at once."""
    task: list[_Box] = []
    nbytes = 0
    for part in parts:
        for region in boxes(part.entry, part.region, nbytes=task_bytes):
            task.append(_Box(part, region))
            nbytes += task[-1].nbytes
            if nbytes >= task_bytes or len(task) == _TASK_BOXES:
                yield task
                task, nbytes = [], 0
    yield task


def _copy(task: list[_Box], source: Source, fd: int) -> int:
    """Read boxes, and write them to where they belong; return their bytes."""
    jobs = [
        engine.ReadJob(
            box.of.entry.array,
            box.of.entry.codec,
            box.region,
            np.empty(box.region.sizes, box.of.entry.dtype.bits),
            key=box.of,
        )
        for box in task
    ]
    for job in engine.read(jobs, source, Limits(0)):
        values, place = flat(job.out), job.key
        offsets = zip(job.region.offsets, place.region.offsets, strict=True)
        within = Region(tuple(at - first for at, first in offsets), job.region.sizes)
        starts, nbytes = _runs(within, place.region.sizes, job.array.itemsize)
        for number, start in enumerate(starts):
            run = values[number * nbytes : (number + 1) * nbytes]
            write_all(fd, place.start + start, [run])
    return sum(box.nbytes for box in task)


def _runs(region: Region, shape: Shape, itemsize: int) -> tuple[Iterator[int], int]:
    """Return where in a tensor's bytes each unbroken run of a region begins, and a run's bytes.

    Examples
    --------
    >>> starts, nbytes = _runs(Region((1, 2), (2, 3)), (4, 8), itemsize=2)
    >>> list(starts), nbytes
    ([20, 36], 6)
    """
    cut = [axis for axis, n in enumerate(shape) if region.sizes[axis] != n]
    axis = cut[-1] if cut else 0
    steps = [prod(shape[a + 1 :]) * itemsize for a in range(len(shape))]
    first = sum(o * step for o, step in zip(region.offsets[axis:], steps[axis:], strict=True))
    above = coordinates(Region(region.offsets[:axis], region.sizes[:axis]))
    starts = (first + sum(map(int.__mul__, at, steps)) for at in above)
    return starts, prod(region.sizes[axis:]) * itemsize
