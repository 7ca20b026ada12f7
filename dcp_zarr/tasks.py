"""Cuts jobs into tasks and has threads do them, in order and in bounded number."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dcp_zarr.errors import OptionError
from dcp_zarr.region import Region, coordinates

if TYPE_CHECKING:
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape

MEMORY_BUDGET_BYTES = 256 << 20
"""Default for the bytes under way."""

_TASK_BYTES = 8 << 20
"""Uncompressed bytes of a task, where read chunks are smaller and the budget allows it."""
_TASK_JOBS = 64
"""Most jobs that share a task."""


class HasArray(Protocol):
    """Any job on one array."""

    @property
    def array(self) -> ArrayLayout:
        """The array."""


Job = TypeVar("Job", bound=HasArray)
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of this process the engine may take."""

    thread_count: int
    """Worker threads; none: the thread that asks does the work, as where it is a worker itself."""
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES
    """Bytes of values and of encoded read chunks under way; one read chunk a thread at least."""
    is_default: bool = False
    """Whether nobody asked for that number of threads."""

    @classmethod
    def of(cls, thread_count: int | None, memory_budget_bytes: int = MEMORY_BUDGET_BYTES) -> Limits:
        """Return the limits; without a number of threads, this process' share of the cores."""
        is_default = thread_count is None
        if not is_default:
            check_count("thread_count", thread_count)
        return cls(thread_count or default_thread_count(), memory_budget_bytes, is_default)

    def waiting_for(self, calls: int) -> Limits:
        """Return the limits where threads wait for so many calls at once, rather than work."""
        return replace(self, thread_count=max(self.thread_count, calls if self.is_default else 0))

    @property
    def task_bytes(self) -> int:
        """Uncompressed bytes of a task."""
        return min(_TASK_BYTES, self.memory_budget_bytes // (2 * (self.thread_count + 1)))


def default_thread_count() -> int:
    """Return the number of threads for this process: its share of the cores it may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    named = os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = max(int(named), 1) if named.isdecimal() else 1
    return min(max((cores or 1) // processes, 1), 16)


def check_count(name: str, value: object, *, most: int | None = None) -> None:
    """Raise where an option is no whole number of at least one, and at most that many.

    Raises
    ------
    OptionError
        With the option's name and value.
    """
    limit = "" if most is None else f" and at most {most}"
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise OptionError(f"{name}={value!r} is not a whole number of at least 1{limit}.")


@dataclass(frozen=True, slots=True)
class Part(Generic[Job]):
    """Consecutive read chunks of one write chunk; none for a job that has none."""

    job: Job
    write_chunk: Shape
    read_chunks: list[Shape]
    last: bool

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of its read chunks."""
        return len(self.read_chunks) * self.job.array.read_chunk_nbytes


def tasks_of(
    jobs: Iterable[Job], wanted: Callable[[Job], Region], task_bytes: int
) -> Iterator[list[Part[Job]]]:
    """Cut jobs into tasks of about that many uncompressed bytes."""
    task: list[Part[Job]] = []
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


def _parts(job: Job, wanted: Region, task_bytes: int) -> Iterator[Part[Job]]:
    """Cut one job into runs of read chunks that a task can hold."""
    array = job.array
    if wanted.volume == 1:  # so are most small tensors
        yield Part(job, array.write_chunks_of(wanted).offsets, [wanted.offsets], last=True)
        return
    most = max(task_bytes // array.read_chunk_nbytes, 1)
    runs: list[tuple[Shape, list[Shape]]] = []
    if wanted.volume:
        for write_chunk in coordinates(array.write_chunks_of(wanted)):
            here = list(coordinates(array.read_chunks_of(write_chunk).intersection(wanted)))
            runs += [(write_chunk, here[i : i + most]) for i in range(0, len(here), most)]
    if not runs:
        yield Part(job, (), [], last=True)
    for number, (write_chunk, read_chunks) in enumerate(runs, start=1):
        yield Part(job, write_chunk, read_chunks, last=number == len(runs))


def in_order(
    tasks: Iterable[Task], work: Callable[[Task], Result], thread_count: int
) -> Iterator[tuple[Task, Result]]:
    """Do the work of tasks in threads; yield each task with its result, in order.

    The first failure ends it, once the tasks under way have ended. Without threads, the caller's
    does it.
    """
    if not thread_count:
        for task in tasks:
            yield task, work(task)
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="dcp_zarr") as pool:
        pending: deque[tuple[Task, Future[Result]]] = deque()
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
