"""Whether every stored byte of a checkpoint is the one that was saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import engine
from dcp_zarr.codecs import checksum
from dcp_zarr.errors import CorruptionError
from dcp_zarr.region import Region, coordinates
from dcp_zarr.tasks import Limits, Part, in_order, tasks_of
from dcp_zarr.tensor_statistics import boxes, read_bits

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import TensorEntry

_BOX_BYTES = 2 << 20
"""Compared at once: what a core's cache holds."""

_MOST_OBJECTS = 1 << 24
"""No store has so many files for one array."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a checkpoint that is not as it was saved."""

    fqn: str | None
    """The tensor whose values are concerned; None for a document."""
    region: Region | None
    """Where in that tensor."""
    message: str
    """What is wrong."""

    def __str__(self) -> str:
        """Describe the damage in a line."""
        return self.message if self.fqn is None else f"{self.fqn} {self.region}: {self.message}"


def damage(source: Source) -> Iterator[Damage]:
    """Check every document, index and read chunk; yield what is lost or changed."""
    for text in source.damaged_documents():
        yield Damage(None, None, text)
    if source.schema.is_foreign:
        return
    arrays = [array for array, _, _ in source.schema.arrays()]
    for array in arrays:
        if (claimed := prod(array.write_grid.counts)) > _MOST_OBJECTS:
            yield Damage(array.fqn, Region.whole(array.shape), f"It claims {claimed} objects.")
    jobs = [
        engine.CheckJob(array, write_chunk)
        for array in arrays
        if prod(array.write_grid.counts) <= _MOST_OBJECTS
        for write_chunk in coordinates(array.write_grid.touched(Region.whole(array.shape)))
    ]
    for job, error in engine.check(jobs, source, Limits.of(None)):
        region = job.array.write_grid.box(job.write_chunk)
        yield Damage(job.array.fqn, region, str(error))


def check_same(
    old: Mapping[str, TensorEntry],
    new: Mapping[str, TensorEntry],
    sources: tuple[Source, Source],
    limits: Limits,
    as_stored: Collection[str] = (),
) -> Iterator[int]:
    """Compare tensors that should be the same, bit for bit; yield numbers of bytes.

    Parameters
    ----------
    old, new
        The tensors, by FQN.
    sources
        Where the old ones and the new ones are.
    limits
        Threads; each has one box of two tensors in memory.
    as_stored
        FQNs of those of which each read chunk should be stored as it was: their checksums are
        compared, once they hold.

    Raises
    ------
    CorruptionError
        With the name of the first that is missing or not the same.
    """
    for fqn in [*old, *new]:
        is_in_both = fqn in old and fqn in new
        if not is_in_both or _kind(old[fqn]) != _kind(new[fqn]):
            raise _differ(fqn, "name, dtype or shape", sources)
    copied = set(as_stored)
    for fqn in as_stored:
        first, second = (
            _checksums(of[fqn], source, limits)
            for of, source in zip((old, new), sources, strict=True)
        )
        if first != second:
            raise _differ(fqn, "read chunks", sources)
        yield old[fqn].array.nbytes
    pairs = [(entry, new[fqn]) for fqn, entry in old.items() if fqn not in copied]
    tasks = (
        (pair, box)
        for pair in pairs
        for box in boxes(pair[1], nbytes=max(_BOX_BYTES, pair[0].array.read_chunk_nbytes))
    )
    work = partial(_is_same, sources=sources)
    for (pair, box), same in in_order(tasks, work, limits.thread_count):
        if not same:
            raise _differ(pair[0].fqn, f"values in {box}", sources)
        yield box.volume * pair[0].array.itemsize


def _kind(entry: TensorEntry) -> tuple[object, ...]:
    return entry.dtype.torch_name, entry.array.shape


def _checksums(entry: TensorEntry, source: Source, limits: Limits) -> dict[Shape, bytes]:
    """Return the checksum of each stored read chunk, which holds."""

    def of_task(parts: list[Part[TensorEntry]]) -> list[tuple[Shape, bytes]]:
        return [
            (read_chunk, checksum(encoded) if crc is None else bytes(crc))
            for part in parts
            if part.read_chunks
            for read_chunk, encoded, crc in engine.stored_read_chunks(part, source)
        ]

    whole = Region.whole(entry.array.shape)
    tasks = tasks_of([entry], lambda e: e.array.read_grid.touched(whole), limits.task_bytes)
    found = in_order(tasks, of_task, limits.thread_count)
    return dict(chain.from_iterable(pairs for _, pairs in found))


def _is_same(
    task: tuple[tuple[TensorEntry, TensorEntry], Region], sources: tuple[Source, Source]
) -> bool:
    entries, box = task
    nbytes = box.volume * entries[0].array.itemsize
    unit = np.uint64 if nbytes % 8 == 0 else np.uint8
    first, second = (
        read_bits(entry, source, box).reshape(-1).view(unit)
        for entry, source in zip(entries, sources, strict=True)
    )
    return np.array_equal(first, second)


def _differ(fqn: str, what: str, sources: tuple[Source, Source]) -> CorruptionError:
    old, new = (source.where for source in sources)
    return CorruptionError(
        f"Tensor {fqn!r} is not the same in {new!r} as in {old!r}: its {what} differ. The disk may "
        "be failing, or something else writes there.",
        fqn=fqn,
        path=new,
    )
