"""Writing one safetensors file: values stream from a container to their places in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import engine
from dcp_zarr.local_files import BackgroundSync, write_all
from dcp_zarr.region import Region, coordinates
from dcp_zarr.safetensors_format import HeaderEntry, header
from dcp_zarr.tasks import Limits, in_order
from dcp_zarr.tensor_statistics import boxes

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import TensorEntry

_TASK_BYTES = 8 << 20
_TASK_BOXES = 64


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint, and its name in a file."""

    name: str
    """Its name there."""
    entry: TensorEntry
    """The tensor."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.entry.array.nbytes


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a tensor, on its way to a file."""

    entry: TensorEntry
    region: Region
    start: int
    """Where the tensor begins in the file."""

    @property
    def nbytes(self) -> int:
        return self.region.volume * self.entry.array.itemsize


def split(tensors: Iterable[NamedTensor], file_bytes: int | None) -> list[list[NamedTensor]]:
    """Part tensors, in their order, into files of at most that many bytes; None for one file.

    A tensor that is larger has a file of its own.
    """
    files: list[list[NamedTensor]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if file_bytes is not None and files[-1] and nbytes + tensor.nbytes > file_bytes:
            files.append([])
            nbytes = 0
        files[-1].append(tensor)
        nbytes += tensor.nbytes
    return files


def write_file(
    path: str | os.PathLike[str], tensors: Sequence[NamedTensor], source: Source, limits: Limits
) -> Iterator[int]:
    """Write a new file, and make it durable; yield numbers of bytes of tensors as they are written.

    Tensors of larger elements stand first, so that all are aligned.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.entry.array.itemsize)
    begin = header(
        HeaderEntry(t.name, t.entry.dtype.torch_name, t.entry.array.shape, t.nbytes)
        for t in ordered
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        sync = BackgroundSync(fd, enabled=True)
        try:
            write_all(fd, 0, [begin])
            copy = partial(_copy, source=source, fd=fd)
            for _, nbytes in in_order(_tasks(ordered, len(begin)), copy, limits.thread_count):
                sync.wrote(nbytes)
                yield nbytes
        finally:
            sync.close()
    finally:
        os.close(fd)


def _tasks(tensors: Iterable[NamedTensor], start: int) -> Iterator[list[_Box]]:
    """Cut tensors that follow each other in a file into what a thread copies at once."""
    task: list[_Box] = []
    nbytes = 0
    for tensor in tensors:
        for region in boxes(tensor.entry):
            task.append(_Box(tensor.entry, region, start))
            nbytes += task[-1].nbytes
            if nbytes >= _TASK_BYTES or len(task) == _TASK_BOXES:
                yield task
                task, nbytes = [], 0
        start += tensor.nbytes
    yield task


def _copy(task: list[_Box], source: Source, fd: int) -> int:
    """Read boxes, and write them to where they belong; return their bytes."""
    jobs = [
        engine.ReadJob(
            box.entry.array,
            box.entry.codec,
            box.region,
            np.empty(box.region.sizes, box.entry.dtype.bits),
            key=box,
        )
        for box in task
    ]
    for job in engine.read(jobs, source, Limits.of(1)):
        values = engine.flat(job.out)
        starts, nbytes = _runs(job.region, job.array.shape, job.array.itemsize)
        for number, start in enumerate(starts):
            run = values[number * nbytes : (number + 1) * nbytes]
            write_all(fd, job.key.start + start, [run])
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
