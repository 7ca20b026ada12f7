"""Writes what a source holds into a container of ours: one writer, all of it, without torch.

No rank cuts anything here: read chunks are those of a tensor that one rank saves, or those that it
has. The regions in which ranks saved it are told as they were.
"""

from __future__ import annotations

import threading
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import engine
from dcp_zarr.codecs import checksum
from dcp_zarr.coordinator import MAX_PACKED_OBJECT_BYTES, bytes_job
from dcp_zarr.errors import CorruptionError
from dcp_zarr.layout import object_layout
from dcp_zarr.layout_rules import whole_write_shape
from dcp_zarr.names import OBJECTS_PATH
from dcp_zarr.placement import TensorPlan, plan_save
from dcp_zarr.region import Region, Tiling
from dcp_zarr.schema import ObjectEntry, TensorEntry
from dcp_zarr.slabs import ALIGNMENT, Slab
from dcp_zarr.tasks import Part, in_order, tasks_of
from dcp_zarr.tensor_statistics import boxes, read_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Buffer, Sink, Source, Target
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.placement import SaveOptions
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Entry, Schema
    from dcp_zarr.tasks import Limits

_ENDLESS = 1 << 62

Wrote = Callable[[int], None]
"""Called with a number of bytes of tensors when they are on their way."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How tensors are to be stored."""

    options: SaveOptions
    """Those of a save; they hold where nothing is kept."""
    keeps_codecs: bool
    """Whether a tensor is compressed as it was."""
    keeps_read_chunks: bool
    """Whether its read chunks are those that it had, where the container takes them."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """An object as it is to be stored: its bytes, as `torch.save` writes them, or a JSON value."""

    payload: bytes | None
    """The bytes; None where it is JSON."""
    json: tuple[Any, ...] = ()
    """The value, alone in a tuple."""


def write_container(
    target: Target,
    source: Source,
    schema: Schema,
    objects: Mapping[str, StoredAs],
    how: Rewriting,
    limits: Limits,
    wrote: Wrote,
) -> list[str]:
    """Write a container, and commit it; return the FQNs of tensors copied as they are stored.

    Parameters
    ----------
    target
        The container.
    source
        Where the values are.
    schema
        What is to be in the container: entries of the source, and what is told beside them.
    objects
        How each object is stored.
    how
        How tensors are stored.
    limits
        Threads and memory.
    wrote
        Told of progress.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    paths, entries = _planned(schema, objects, how)
    as_stored = _same_stored_form(schema, entries)
    object_entries, contents = _placed_objects(objects, paths, how.options)
    codec = how.options.compression.codec(OBJECTS_PATH, 1, MAX_PACKED_OBJECT_BYTES)
    target.prepare(1)
    try:
        reserved = target.reserved_nbytes(entries.values())
        slab = None if reserved is None else _endless(reserved)
        with closing(target.open_sink(0, slab)) as sink:
            own = [c for c in contents if c[0].path != OBJECTS_PATH]
            engine.write((bytes_job(*content, codec) for content in own), sink, limits)
            jobs = _jobs(schema.tensors, entries, source, as_stored, limits, wrote)
            stored = engine.write(jobs, sink, limits)
            copies = [_CopyJob(schema.tensors[f].array, entries[f].array) for f in as_stored]
            stored |= _copy_stored(copies, source, sink, limits, wrote)
        with closing(target.open_last_sink(1, entries.values())) as sink:
            packed = [c for c in contents if c[0].path == OBJECTS_PATH]
            engine.write((bytes_job(*content, codec) for content in packed), sink, limits)
        done = {f: replace(e, stored_nbytes=stored.get(f, 0)) for f, e in entries.items()}
        every = {**done, **object_entries}
        ordered = tuple(every[entry.fqn] for entry in schema.entries)
        target.commit(replace(schema, entries=ordered, objects_codec=codec, is_foreign=False))
    except BaseException:
        target.discard()
        raise
    return as_stored


def _endless(reserved: int) -> Slab:
    """Return the part of a file that its only writer owns: all behind what is reserved."""
    return Slab(-(-reserved // ALIGNMENT) * ALIGNMENT, _ENDLESS, 0, 0, 0, 1)


def _planned(
    schema: Schema, objects: Mapping[str, StoredAs], how: Rewriting
) -> tuple[Mapping[str, str], dict[str, TensorEntry]]:
    """Return the path of everything, and each tensor as it is to be stored."""
    plans = {
        fqn: TensorPlan(entry.dtype, Tiling.whole(entry.array.shape))
        for fqn, entry in schema.tensors.items()
    }
    placement = plan_save(plans, list(objects), how.options)
    entries = {}
    for fqn, old in schema.tensors.items():
        array, layout = placement.layouts[fqn], how.options.layout
        kept = old.array.read_chunk_shape
        most = max(layout.most_read_chunk_bytes, layout.read_chunk_bytes)
        if how.keeps_read_chunks and old.array.read_chunk_nbytes <= most:
            write = whole_write_shape(array.shape, kept, array.itemsize, layout)
            array = replace(array, read_chunk_shape=kept, write_chunk_shape=write)
        codec = old.codec if how.keeps_codecs else how.options.codec(array)
        entries[fqn] = replace(old, array=array, codec=codec)
    return placement.paths, entries


def _same_stored_form(schema: Schema, entries: Mapping[str, TensorEntry]) -> list[str]:
    """Return the tensors whose stored read chunks are to be what they are."""
    if schema.is_foreign:
        return []
    return [
        fqn
        for fqn, old in schema.tensors.items()
        if old.codec == entries[fqn].codec
        and old.array.read_chunk_shape == entries[fqn].array.read_chunk_shape
    ]


def _placed_objects(
    objects: Mapping[str, StoredAs], paths: Mapping[str, str], options: SaveOptions
) -> tuple[dict[str, Entry], list[tuple[ArrayLayout, NDArray[np.uint8]]]]:
    """Return an entry for each object, and the arrays of their bytes: small ones share one."""
    entries: dict[str, Entry] = {}
    contents: list[tuple[ArrayLayout, NDArray[np.uint8]]] = []
    small: dict[str, bytes] = {}
    for fqn, stored in objects.items():
        if stored.payload is None:
            entries[fqn] = ObjectEntry(fqn, json=stored.json)
        elif options.own_object_arrays and len(stored.payload) > MAX_PACKED_OBJECT_BYTES:
            array = object_layout(fqn, paths[fqn], len(stored.payload))
            entries[fqn] = ObjectEntry(fqn, (), array, 0, len(stored.payload))
            contents.append((array, np.frombuffer(stored.payload, np.uint8)))
        else:
            small[fqn] = stored.payload
    packed = np.frombuffer(b"".join(small.values()), np.uint8)
    shared = object_layout(OBJECTS_PATH, OBJECTS_PATH, packed.size)
    offsets = accumulate(map(len, small.values()), initial=0)
    for (fqn, payload), offset in zip(small.items(), offsets, strict=False):
        entries[fqn] = ObjectEntry(fqn, (), shared, offset, len(payload))
    return entries, [*contents, (shared, packed)] if small else contents


def _jobs(
    old: Mapping[str, TensorEntry],
    entries: Mapping[str, TensorEntry],
    source: Source,
    as_stored: Collection[str],
    limits: Limits,
    wrote: Wrote,
) -> Iterator[engine.WriteJob]:
    """Yield the jobs that write tensors anew: each box is read at once, and then encoded."""
    skipped = set(as_stored)
    for fqn, entry in entries.items():
        if fqn in skipped:
            continue
        array = entry.array
        # What is read holds a whole read chunk of either side, so that none is read often.
        nbytes = max(limits.task_bytes, old[fqn].array.read_chunk_nbytes)
        for box in boxes(entry, nbytes=nbytes):
            read_chunks = array.read_grid.touched(box)
            if read_chunks.volume:
                values = _ReadOnce(old[fqn], source, box)
                yield engine.WriteJob(array, entry.codec, read_chunks, values, key=fqn)
            wrote(box.volume * array.itemsize)


class _ReadOnce:
    """The values in a box: read when the first are wanted, dropped with the last."""

    def __init__(self, entry: TensorEntry, source: Source, box: Region) -> None:
        self._entry = entry
        self._source = source
        self._box = box
        self._lock = threading.Lock()
        self._values: NDArray[Any] | None = None
        self._wanted = box.volume

    def __call__(self, region: Region) -> NDArray[Any]:
        with self._lock:
            values = self._values
            if values is None:
                values = read_bits(self._entry, self._source, self._box)
            self._wanted -= region.volume
            self._values = values if self._wanted else None
        part: NDArray[Any] = values[region.index(self._box.offsets)]
        return part


@dataclass(frozen=True, slots=True)
class _CopyJob:
    """An array whose read chunks are to be stored as they are."""

    array: ArrayLayout
    """The array in the source."""
    copy: ArrayLayout
    """The array to be."""


def _copy_stored(
    jobs: Iterable[_CopyJob], source: Source, sink: Sink, limits: Limits, wrote: Wrote
) -> dict[Hashable, int]:
    """Copy stored read chunks, whose checksums are checked; return stored bytes by FQN."""
    stored: dict[Hashable, int] = {}
    tasks = tasks_of(
        jobs,
        lambda job: job.array.read_grid.touched(Region.whole(job.array.shape)),
        limits.task_bytes,
    )
    work = partial(_copy_task, source=source, sink=sink)
    for parts, sizes in in_order(tasks, work, limits.thread_count):
        for part, nbytes in zip(parts, sizes, strict=True):
            fqn = part.job.array.fqn
            stored[fqn] = stored.get(fqn, 0) + nbytes
            wrote(part.nbytes)
    return stored


def _copy_task(parts: list[Part[_CopyJob]], source: Source, sink: Sink) -> list[int]:
    sizes = []
    for part in parts:
        by_object: dict[Shape, list[tuple[Shape, Sequence[Buffer]]]] = {}
        counts = part.job.copy.read_chunks_per_write_chunk
        try:
            found = engine.stored_read_chunks(part, source) if part.read_chunks else ()
            for read_chunk, encoded, crc in found:
                write_chunk = tuple(c // n for c, n in zip(read_chunk, counts, strict=True))
                buffers = bytes(encoded), checksum(encoded) if crc is None else bytes(crc)
                by_object.setdefault(write_chunk, []).append((read_chunk, buffers))
        except (CorruptionError, OSError) as error:
            fqn = part.job.array.fqn
            raise CorruptionError(
                f"Tensor {fqn!r} in {source.where!r} cannot be read: {error}",
                fqn=fqn,
                path=source.where,
            ) from error
        for write_chunk, stored in by_object.items():
            sink.place(part.job.copy, write_chunk, stored)
        both = (buffers for stored in by_object.values() for _, buffers in stored)
        sizes.append(sum(len(buffer) for buffers in both for buffer in buffers))
    return sizes
