"""Moves values into and out of a container: in parallel, in bounded memory.

A save cuts each job into tasks of consecutive read chunks of one write chunk; a worker takes a
task through all its steps: values, encoded, with checksums, placed in one system call. A load does
the same backwards, straight into the destination where nothing has to be cut off. Small jobs share
a task. At most one task more than there are threads is under way: that much is in memory, twice
where it is copied or encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import gt
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.encoding import encode, flat
from dcp_zarr.errors import CorruptionError, StoreError
from dcp_zarr.scratch import scratch
from dcp_zarr.tasks import Limits, Part, in_order, tasks_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import Buffer, Extent, Sink, Source, StoredObject
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Region, Shape
    from dcp_zarr.slabs import Slab

_MAX_RUN_BYTES = (2 << 20) + 4096
"""Stored bytes that are read in one call: what a core's cache holds until they are decoded."""
_MAX_GAP_BYTES = 64 << 10
"""Stored read chunks no further apart than this are read in one call."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Read chunks of one array that this process writes."""

    array: ArrayLayout
    """The array."""
    codec: Codec
    """How its read chunks are compressed."""
    read_chunks: Region
    """The read chunks to write, as a box of grid coordinates."""
    values: Callable[[Region], NDArray[Any]]
    """Gives the bits in a region of the tensor; called from worker threads."""
    key: Hashable = None
    """Whatever the caller knows the job by."""
    slab: Slab | None = None
    """Where they go in an object that is shared with other writers."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckJob:
    """One write chunk whose read chunks are to be checked, but not decoded."""

    array: ArrayLayout
    """The array."""
    write_chunk: Shape
    """Its coordinates."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadJob:
    """A region of one array that this process wants."""

    array: ArrayLayout
    """The array."""
    codec: Codec
    """How its read chunks are compressed."""
    region: Region
    """The region, in the tensor's index space."""
    out: NDArray[Any]
    """Where its bits go, of shape ``region.sizes``; any strides."""
    key: Any = None
    """Whatever the caller knows the job by."""


def write(
    jobs: Iterable[WriteJob],
    sink: Sink,
    limits: Limits,
    done: Callable[[int], None] | None = None,
) -> dict[Hashable, int]:
    """Encode and place the read chunks of all jobs.

    Parameters
    ----------
    jobs
        Taken one by one, as threads become free.
    sink
        Where the bytes go.
    limits
        Threads and memory.
    done
        Told the uncompressed bytes of each task that is done.

    Returns
    -------
    For each job's key the stored bytes, checksums included.
    """
    stored: dict[Hashable, int] = {}
    limits = limits.waiting_for(sink.network_calls)
    tasks = tasks_of(jobs, lambda job: job.read_chunks, limits.task_bytes)
    work = partial(_write_task, sink=sink)
    for parts, sizes in in_order(tasks, work, limits.thread_count):
        for part, nbytes in zip(parts, sizes, strict=True):
            stored[part.job.key] = stored.get(part.job.key, 0) + nbytes
            if done is not None:
                done(part.nbytes)
    return stored


def read(jobs: Iterable[ReadJob], source: Source, limits: Limits) -> Iterator[ReadJob]:
    """Fill the destinations of all jobs; yield each job, in order, when it is filled.

    Raises
    ------
    CorruptionError
        If a read chunk is missing or its checksum does not hold; what else it names is the tensor
        and the region.
    """
    limits = limits.waiting_for(source.network_calls)
    # Values go straight to where they belong, so a task may be larger than one that holds its own.
    task_bytes = 2 * limits.task_bytes
    tasks = tasks_of(jobs, lambda job: job.array.read_grid.touched(job.region), task_bytes)
    work = partial(_read_task, source=source)
    for parts, _ in in_order(tasks, work, limits.thread_count):
        yield from (part.job for part in parts if part.last)
    source.check_unchanged()


def check(
    jobs: Iterable[CheckJob], source: Source, limits: Limits
) -> Iterator[tuple[CheckJob, Exception]]:
    """Read all stored read chunks of write chunks; yield those write chunks that are damaged."""
    limits = limits.waiting_for(source.network_calls)
    tasks = tasks_of(jobs, lambda job: job.array.read_chunks_of(job.write_chunk), limits.task_bytes)
    work = partial(_check_task, source=source)
    for _, damage in in_order(tasks, work, limits.thread_count):
        yield from damage
    source.check_unchanged()


def _check_task(parts: list[Part[CheckJob]], source: Source) -> list[tuple[CheckJob, Exception]]:
    damage: list[tuple[CheckJob, Exception]] = []
    for part in parts:
        try:
            for _ in stored_read_chunks(part, source):
                pass
        except StoreError:
            raise
        except (CorruptionError, OSError) as error:
            damage.append((part.job, error))
    return damage


def stored_read_chunks(
    part: Part[Any], source: Source
) -> Iterator[tuple[Shape, memoryview, Buffer | None]]:
    """Yield the read chunks of a part as they are stored, each with its checksum, which holds.

    The bytes are overwritten when the next are read.

    Raises
    ------
    CorruptionError
        If one is missing or its checksum does not hold.
    """
    with source.open_object(part.job.array, part.write_chunk) as stored:
        for run in _runs(part, stored):
            for read_chunk, encoded, crc in _read_run(run, stored):
                _check(encoded, crc, part.job.array, read_chunk)
                yield read_chunk, encoded, crc


def _write_task(parts: list[Part[WriteJob]], sink: Sink) -> list[int]:
    sizes = []
    for part in parts:
        job = part.job
        stored = [(c, encode(job.array, job.codec, job.values, c)) for c in part.read_chunks]
        if stored:
            sink.place(part.job.array, part.write_chunk, stored, part.job.slab)
        sizes.append(sum(len(buffer) for _, buffers in stored for buffer in buffers))
        del stored  # may be the values themselves; they go before the next are resolved
    return sizes


def _read_task(parts: list[Part[ReadJob]], source: Source) -> None:
    for part in parts:
        if not part.read_chunks:
            continue
        job = part.job
        destination = _destinations(job)
        try:
            with source.open_object(job.array, part.write_chunk) as stored:
                for run in _runs(part, stored):
                    _fill(job, run, stored, destination)
        except (CorruptionError, OSError) as error:
            fqn, region = job.array.fqn, str(job.region)
            kind = StoreError if isinstance(error, StoreError) else CorruptionError
            raise kind(
                f"Tensor {fqn!r} {region} in {source.where!r} cannot be read: {error}",
                fqn=fqn,
                region=region,
                path=source.where,
            ) from error


Run = list[tuple["Extent", "Shape"]]


def _runs(part: Part[Any], stored: StoredObject) -> Iterator[Run]:
    """Group a part's read chunks, with where they lie, by what one call may read."""
    run: Run = []
    extents = zip(stored.extents(part.read_chunks), part.read_chunks, strict=True)
    end = 0
    for extent, read_chunk in sorted(extents, key=_offset):
        if run:
            far = extent.offset - end > _MAX_GAP_BYTES
            if far or extent.offset + extent.nbytes - run[0][0].offset > _MAX_RUN_BYTES:
                yield run
                run = []
        end = extent.offset + extent.nbytes
        run.append((extent, read_chunk))
    yield run


def _offset(lying: tuple[Extent, Shape]) -> int:
    return lying[0].offset


def _read_run(run: Run, stored: StoredObject) -> Iterator[tuple[Shape, memoryview, Buffer | None]]:
    """Read a run in one call; yield each read chunk's place, encoded bytes and checksum, if any."""
    start = run[0][0].offset
    together = scratch("stored", max(extent.offset + extent.nbytes for extent, _ in run) - start)
    stored.read_into(start, [together])
    for (offset, nbytes, crc, is_checked), read_chunk in run:
        first, end = offset - start, offset - start + nbytes
        if not is_checked:
            yield read_chunk, together[first:end], None
        elif crc is not None:
            yield read_chunk, together[first:end], crc
        else:
            body = max(end - CHECKSUM_BYTES, first)
            yield read_chunk, together[first:body], together[body:end]


Destination = Callable[["Shape"], "memoryview | None"]


def _destinations(job: ReadJob) -> Destination:
    """Return what gives the bytes of the destination that are a read chunk whole.

    It gives None for a read chunk that has to be cut, or whose place is not contiguous.
    """
    shape, region, out = job.array.read_chunk_shape, job.region, job.out

    def box(read_chunk: Shape) -> memoryview | None:
        starts = [c * n - o for c, n, o in zip(read_chunk, shape, region.offsets, strict=True)]
        ends = [start + n for start, n in zip(starts, shape, strict=True)]
        if min(starts, default=0) < 0 or any(map(gt, ends, region.sizes)):
            return None
        # The ellipsis: an array without axes gives a view, not a scalar.
        index: tuple[Any, ...] = (*map(slice, starts, ends), ...)
        part = out[index]
        return flat(part) if part.flags.c_contiguous else None

    aligned = not any(o % n for o, n in zip(region.offsets[1:], shape[1:], strict=True))
    rows_alone = bool(shape) and aligned and shape[1:] == region.sizes[1:]
    if not rows_alone or not out.flags.c_contiguous:
        return box
    whole, row_nbytes = flat(out), prod(shape[1:]) * out.itemsize
    rows, first, count = shape[0], region.offsets[0], region.sizes[0]

    def slab(read_chunk: Shape) -> memoryview | None:
        start = read_chunk[0] * rows - first
        if start < 0 or start + rows > count:
            return None
        return whole[start * row_nbytes : (start + rows) * row_nbytes]

    return slab


def _fill(job: ReadJob, run: Run, stored: StoredObject, destination: Destination) -> None:
    """Read, check and decode stored read chunks that lie near each other."""
    if job.codec.name == "none" and _read_in_place(job, run, stored, destination):
        return
    for read_chunk, encoded, crc in _read_run(run, stored):
        _check(encoded, crc, job.array, read_chunk)
        out = destination(read_chunk)
        if out is None:
            _decode_part(job, read_chunk, encoded)
        else:
            job.codec.decode(encoded, out)


def _read_in_place(job: ReadJob, run: Run, stored: StoredObject, destination: Destination) -> bool:
    """Read uncompressed read chunks straight into the destination; False where they do not fit."""
    crcs = scratch("crcs", CHECKSUM_BYTES * len(run))
    buffers: list[memoryview] = []
    to_check: list[tuple[memoryview, Buffer | None, Shape]] = []
    end = run[0][0].offset
    for number, ((offset, nbytes, crc, is_checked), read_chunk) in enumerate(run):
        out = destination(read_chunk)
        if out is None or offset != end:
            return False
        buffers.append(out)
        end += len(out)
        expected: Buffer | None = crc
        if is_checked and crc is None:
            expected = crcs[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)]
            buffers.append(expected)
            end += CHECKSUM_BYTES
        if offset + nbytes != end:
            return False
        to_check.append((out, expected, read_chunk))
    stored.read_into(run[0][0].offset, buffers)
    for out, expected, read_chunk in to_check:
        _check(out, expected, job.array, read_chunk)
    return True


def _check(encoded: memoryview, crc: Buffer | None, array: ArrayLayout, read_chunk: Shape) -> None:
    if crc is not None and checksum(encoded) != crc:
        box = array.read_grid.box(read_chunk)
        raise CorruptionError(f"The checksum of its read chunk {box} does not hold.")


def _decode_part(job: ReadJob, read_chunk: Shape, encoded: memoryview) -> None:
    """Decode a read chunk of which the destination wants a part, or wants it elsewhere."""
    array = job.array
    box = array.read_grid.box(read_chunk)
    decoded = scratch("decoded", array.read_chunk_nbytes)
    job.codec.decode(encoded, decoded)
    whole = np.frombuffer(decoded, job.out.dtype).reshape(array.read_chunk_shape)
    wanted = box.intersection(job.region)
    job.out[wanted.index(job.region.offsets)] = whole[wanted.index(box.offsets)]
