"""Moves values into and out of a container: in parallel, in bounded memory.

A save cuts each job into tasks of consecutive read chunks of one write chunk; a worker takes a
task through all its steps: values, encoded, with checksums, placed in one system call. A load does
the same backwards, straight into the destination where nothing has to be cut off. Small jobs share
a task. At most one task more than there are threads is under way: that much is in memory, twice
where it is copied or encoded.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.errors import CorruptionError
from dcp_zarr.region import Region, coordinates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import Buffer, Sink, Source, StoredObject
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape

MEMORY_BUDGET_BYTES = 256 << 20
"""Default for the bytes under way."""

_TASK_BYTES = 8 << 20
"""Uncompressed bytes of a task, where read chunks are smaller and the budget allows it."""
_TASK_JOBS = 64
_MAX_GAP_BYTES = 64 << 10
"""Stored read chunks no further apart than this are read in one call."""

Result = TypeVar("Result")


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


def default_thread_count() -> int:
    """Return the number of threads for this process: its share of the cores it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max((cores or 1) // max(processes, 1), 1), 16)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of this process the engine may take."""

    thread_count: int
    """Worker threads."""
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES
    """Bytes of values and of encoded read chunks under way; one read chunk a thread at least."""

    @classmethod
    def of(cls, thread_count: int | None, memory_budget_bytes: int = MEMORY_BUDGET_BYTES) -> Limits:
        """Return the limits; without a number of threads, this process' share of the cores."""
        return cls(thread_count or default_thread_count(), memory_budget_bytes)

    @property
    def task_bytes(self) -> int:
        """Uncompressed bytes of a task."""
        return min(_TASK_BYTES, self.memory_budget_bytes // (2 * (self.thread_count + 1)))


def write(jobs: Iterable[WriteJob], sink: Sink, limits: Limits) -> dict[Hashable, int]:
    """Encode and place the read chunks of all jobs.

    Parameters
    ----------
    jobs
        Taken one by one, as threads become free.
    sink
        Where the bytes go.
    limits
        Threads and memory.

    Returns
    -------
    For each job's key the stored bytes, checksums included.
    """
    stored: dict[Hashable, int] = {}
    tasks = _tasks(jobs, lambda job: job.read_chunks, limits.task_bytes)
    work = partial(_write_task, sink=sink)
    for parts, sizes in _in_order(tasks, work, limits.thread_count):
        for part, nbytes in zip(parts, sizes, strict=True):
            stored[part.job.key] = stored.get(part.job.key, 0) + nbytes
    return stored


def read(jobs: Iterable[ReadJob], source: Source, limits: Limits) -> Iterator[ReadJob]:
    """Fill the destinations of all jobs; yield each job, in order, when it is filled.

    Raises
    ------
    CorruptionError
        If a read chunk is missing or its checksum does not hold; what else it names is the tensor
        and the region.
    """
    tasks = _tasks(jobs, lambda job: job.array.read_grid.touched(job.region), limits.task_bytes)
    work = partial(_read_task, source=source)
    for parts, _ in _in_order(tasks, work, limits.thread_count):
        yield from (part.job for part in parts if part.last)


Job = TypeVar("Job", WriteJob, ReadJob)


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive read chunks of one write chunk; none for a job that has none."""

    job: Any
    write_chunk: Shape
    read_chunks: list[Shape]
    last: bool

    @property
    def nbytes(self) -> int:
        return len(self.read_chunks) * int(self.job.array.read_chunk_nbytes)


def _tasks(
    jobs: Iterable[Job], wanted: Callable[[Job], Region], task_bytes: int
) -> Iterator[list[_Part]]:
    """Cut jobs into tasks of about that many uncompressed bytes."""
    task: list[_Part] = []
    nbytes = 0
    for job in jobs:
        for part in _parts(job, wanted(job), task_bytes):
            task.append(part)
            nbytes += part.nbytes
            if nbytes >= task_bytes or len(task) >= _TASK_JOBS:
                yield task
                task, nbytes = [], 0
    if task:
        yield task


def _parts(job: WriteJob | ReadJob, wanted: Region, task_bytes: int) -> Iterator[_Part]:
    """Cut one job into runs of read chunks that a task can hold."""
    array = job.array
    most = max(task_bytes // array.read_chunk_nbytes, 1)
    runs: list[tuple[Shape, list[Shape]]] = []
    if wanted.volume:
        for write_chunk in coordinates(array.write_chunks_of(wanted)):
            here = list(coordinates(array.read_chunks_of(write_chunk).intersection(wanted)))
            runs += [(write_chunk, here[i : i + most]) for i in range(0, len(here), most)]
    if not runs:
        yield _Part(job, (), [], last=True)
    for number, (write_chunk, read_chunks) in enumerate(runs, start=1):
        yield _Part(job, write_chunk, read_chunks, last=number == len(runs))


def _in_order(
    tasks: Iterable[list[_Part]], work: Callable[[list[_Part]], Result], thread_count: int
) -> Iterator[tuple[list[_Part], Result]]:
    """Do the work of tasks in threads; yield each task with its result, in order.

    The first failure ends it, once the tasks under way have ended.
    """
    with ThreadPoolExecutor(thread_count, thread_name_prefix="dcp_zarr") as pool:
        pending: deque[tuple[list[_Part], Future[Result]]] = deque()
        try:
            for task in tasks:
                pending.append((task, pool.submit(work, task)))
                while len(pending) > thread_count:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _write_task(parts: list[_Part], sink: Sink) -> list[int]:
    sizes = []
    for part in parts:
        stored = [(c, encode_read_chunk(part.job, c)) for c in part.read_chunks]
        if stored:
            sink.place(part.job.array, part.write_chunk, stored)
        sizes.append(sum(len(buffer) for _, buffers in stored for buffer in buffers))
    return sizes


def encode_read_chunk(job: WriteJob, read_chunk: Shape) -> Sequence[Buffer]:
    """Return the stored form of a read chunk: its encoded bytes and their crc32c.

    What overhangs the tensor is filled with zeros.
    """
    array = job.array
    box = array.read_grid.box(read_chunk)
    values = job.values(box)
    if box.sizes != array.read_chunk_shape:
        padded = np.zeros(array.read_chunk_shape, values.dtype)
        padded[tuple(slice(0, n) for n in box.sizes)] = values
        values = padded
    values = np.ascontiguousarray(values)
    compressor = job.codec.compressor()
    encoded = flat(values) if compressor is None else compressor.encode(values)
    return [encoded, checksum(encoded)]


def flat(values: NDArray[Any]) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return values.reshape(-1).view("u1").data


def _read_task(parts: list[_Part], source: Source) -> None:
    for part in parts:
        if not part.read_chunks:
            continue
        try:
            with source.open_object(part.job.array, part.write_chunk) as stored:
                _read_part(part, stored)
        except CorruptionError as error:
            fqn, region = part.job.array.fqn, str(part.job.region)
            raise CorruptionError(
                f"Tensor {fqn!r} {region} in {source.where!r} cannot be read: {error}",
                fqn=fqn,
                region=region,
                path=source.where,
            ) from error


_scratch = threading.local()


def _buffer(name: str, nbytes: int) -> memoryview:
    """Return this thread's buffer of that name: fresh memory costs more than a copy."""
    buffer = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(1 << (nbytes - 1).bit_length(), np.uint8).data
        setattr(_scratch, name, buffer)
    return buffer[:nbytes]


def _read_part(part: _Part, stored: StoredObject) -> None:
    """Read the part's read chunks, neighbours in one call."""
    extents = sorted((*stored.extent(c), c) for c in part.read_chunks)
    run: list[tuple[int, int, Shape]] = []
    for offset, nbytes, read_chunk in extents:
        if run:
            end = run[-1][0] + run[-1][1]
            too_long = offset + nbytes - run[0][0] > 2 * _TASK_BYTES
            if offset - end > _MAX_GAP_BYTES or too_long:
                _read_run(part.job, run, stored)
                run = []
        run.append((offset, nbytes, read_chunk))
    _read_run(part.job, run, stored)


def _read_run(job: ReadJob, run: list[tuple[int, int, Shape]], stored: StoredObject) -> None:
    """Read, check and decode stored read chunks that lie near each other."""
    if job.codec.name == "none" and _read_in_place(job, run, stored):
        return
    start = run[0][0]
    nbytes = run[-1][0] + run[-1][1] - start
    scratch = _buffer("stored", nbytes)
    stored.read_into(start, [scratch])
    for offset, size, read_chunk in run:
        encoded = scratch[offset - start : offset - start + size - CHECKSUM_BYTES]
        crc = scratch[offset - start + size - CHECKSUM_BYTES : offset - start + size]
        _check(encoded, crc, job, read_chunk)
        _decode(job, read_chunk, encoded)


def _read_in_place(job: ReadJob, run: list[tuple[int, int, Shape]], stored: StoredObject) -> bool:
    """Read uncompressed read chunks straight into the destination; False where they do not fit."""
    crcs = _buffer("crcs", CHECKSUM_BYTES * len(run))
    buffers: list[memoryview] = []
    end = run[0][0]
    for number, (offset, nbytes, read_chunk) in enumerate(run):
        out = _destination(job, read_chunk)
        if out is None or offset != end or nbytes != out.nbytes + CHECKSUM_BYTES:
            return False
        end = offset + nbytes
        buffers += [flat(out), crcs[CHECKSUM_BYTES * number : CHECKSUM_BYTES * (number + 1)]]
    stored.read_into(run[0][0], buffers)
    for number, (_, _, read_chunk) in enumerate(run):
        _check(buffers[2 * number], buffers[2 * number + 1], job, read_chunk)
    return True


def _destination(job: ReadJob, read_chunk: Shape) -> NDArray[Any] | None:
    """Return the part of the destination that is exactly a read chunk and contiguous, or None."""
    array = job.array
    box = array.read_grid.box(read_chunk)
    if box.sizes != array.read_chunk_shape or box.intersection(job.region) != box:
        return None
    out = job.out[box.index(job.region.offsets)]
    return out if out.flags.c_contiguous else None


def _check(encoded: memoryview, crc: memoryview, job: ReadJob, read_chunk: Shape) -> None:
    if checksum(encoded) != crc:
        box = job.array.read_grid.box(read_chunk)
        raise CorruptionError(f"The checksum of its read chunk {box} does not hold.")


def _decode(job: ReadJob, read_chunk: Shape, encoded: memoryview) -> None:
    out = _destination(job, read_chunk)
    if out is not None:
        job.codec.decode(encoded, out)
        return
    array = job.array
    box = array.read_grid.box(read_chunk)
    whole = np.frombuffer(_buffer("decoded", array.read_chunk_nbytes), job.out.dtype)
    whole = whole.reshape(array.read_chunk_shape)
    job.codec.decode(encoded, whole)
    wanted = box.intersection(job.region)
    job.out[wanted.index(job.region.offsets)] = whole[wanted.index(box.offsets)]
