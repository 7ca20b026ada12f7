"""A rank's way into the directory of a save: objects, their indexes, and staging files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import names, zarr_format
from dcp_zarr.containers.appender import Appender
from dcp_zarr.containers.placed import PLACED, Placed
from dcp_zarr.containers.staging import OWN, Staging, open_file
from dcp_zarr.local_files import sync_file, write_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.slabs import Slab


SYNC_THREADS = 8
"""Threads that wait for files to become durable; the file system joins their waits."""
_MAX_UNSYNCED_FILES = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
"""Files that may be open while they wait for that."""
BATCH_FILES = 16
"""Small files that one thread makes durable in turn."""
_LARGE_FILE_BYTES = 1 << 20
"""A file of that size is made durable at once."""


@dataclass(slots=True)
class _OpenObject:
    """A write chunk that is being written."""

    fd: int
    extents: NDArray[np.uint64]
    missing: int
    end: int = 0


@dataclass(slots=True)
class _SharedObject:
    """An object that other ranks write to as well, as far as this one does."""

    fd: int
    appender: Appender
    missing: int


@dataclass
class DirectorySink:
    """A rank's way into the partial directory."""

    root: int
    """Descriptor of the partial directory."""
    rank: int
    """Group rank."""
    sync: bool
    """Whether objects are made durable as they are completed."""
    network_calls: int = field(default=0, init=False)
    """None of its calls waits for a network."""
    _staging: Staging = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _directories: set[str] = field(default_factory=set)
    _objects: dict[tuple[str, Shape], _OpenObject] = field(default_factory=dict)
    _shared: dict[tuple[str, Slab], _SharedObject] = field(default_factory=dict)
    _placed: Placed = field(default_factory=Placed)
    _written: list[int] = field(default_factory=list)
    _syncs: list[Future[None]] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(SYNC_THREADS))
    _open_files: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(_MAX_UNSYNCED_FILES)
    )

    def __post_init__(self) -> None:
        """Prepare the staging files."""
        self._staging = Staging(self.root, self.rank)

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab | None = None,
    ) -> None:
        """Append read chunks to their object; the last to come writes the index."""
        if slab is not None:
            self._place_shared(array, write_chunk, stored, slab)
            return
        if not zarr_format.has_index(array):
            ((_, buffers),) = stored
            self._complete(self._open(array, write_chunk), 0, buffers)
            return
        sizes = [sum(map(len, buffers)) for _, buffers in stored]
        with self._lock:
            written = self._objects.get((array.path, write_chunk))
            if written is None:
                written = self._begin(array, write_chunk)
            start = written.end
            written.end += sum(sizes)
        write_all(written.fd, start, [buffer for _, buffers in stored for buffer in buffers])
        offsets = np.cumsum([start, *sizes[:-1]])
        with self._lock:
            for (read_chunk, _), offset, size in zip(stored, offsets, sizes, strict=True):
                written.extents[_position(array, read_chunk)] = offset, size
            written.missing -= len(stored)
            if written.missing:
                return
            del self._objects[array.path, write_chunk]
        index = zarr_format.encode_index(written.extents)
        self._complete(written.fd, written.end, [index])

    def _place_shared(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab,
    ) -> None:
        """Append read chunks to this writer's slabs, and note where they are."""
        with self._lock:
            shared = self._shared.get((array.path, slab))
            if shared is None:
                fd = self._open(array, write_chunk, os.O_CREAT)
                shared = _SharedObject(fd, Appender(fd, slab), slab.count)
                self._shared[array.path, slab] = shared
        lying = shared.appender.append([buffers for _, buffers in stored])
        positions = [_position(array, read_chunk) for read_chunk, _ in stored]
        with self._lock:
            self._placed.add(array.path, [(p, *at) for p, at in zip(positions, lying, strict=True)])
            shared.missing -= len(stored)
            if shared.missing:
                return
            del self._shared[array.path, slab]
        self._finish(shared.fd, array.read_chunk_nbytes * slab.count)

    def _begin(self, array: ArrayLayout, write_chunk: Shape) -> _OpenObject:
        counts = array.read_chunks_per_write_chunk
        extents = np.full((prod(counts), 2), zarr_format.MISSING, np.uint64)
        missing = array.read_chunks_of(write_chunk).volume
        written = _OpenObject(self._open(array, write_chunk), extents, missing)
        self._objects[array.path, write_chunk] = written
        return written

    def _open(self, array: ArrayLayout, write_chunk: Shape, flags: int = OWN) -> int:
        self._make_directories(array.path)
        return open_file(zarr_format.object_path(array, write_chunk), self.root, flags)

    def _make_directories(self, path: str) -> None:
        if path in self._directories:
            return
        for above in [*names.parents([path]), path]:
            if above not in self._directories:
                with suppress(FileExistsError):
                    os.mkdir(above, dir_fd=self.root)
                self._directories.add(above)

    def _complete(self, fd: int, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the last of a file; others wait until it is durable, while this thread goes on."""
        try:
            write_all(fd, offset, buffers)
        except BaseException:
            os.close(fd)
            raise
        self._finish(fd, offset + sum(map(len, buffers)))

    def _finish(self, fd: int, nbytes: int) -> None:
        """Close a file, once it is durable."""
        if not self.sync:
            os.close(fd)
            return
        self._open_files.acquire()
        large = nbytes >= _LARGE_FILE_BYTES
        with self._lock:
            self._written.append(fd)
            batch = self._written if large or len(self._written) >= BATCH_FILES else []
            if batch:
                self._written = []
        self._sync_later(batch)

    def _sync_later(self, batch: list[int]) -> None:
        if batch:
            self._syncs.append(self._pool.submit(self._sync_and_close, batch))

    def _sync_and_close(self, batch: list[int]) -> None:
        """Make files durable; close all of them, also where one fails."""
        with ExitStack() as stack:
            for fd in batch:
                stack.callback(self._open_files.release)
                stack.callback(os.close, fd)
            for fd in batch:
                sync_file(fd)

    def stage(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into one of the rank's staging files."""
        self._staging.write(name, offset, buffers)

    def close(self) -> None:
        """Wait until all is durable, and close all files.

        Objects that never got all their read chunks stay incomplete.
        """
        try:
            if self._placed:
                self.stage(PLACED, 0, [self._placed.encoded()])
        finally:
            self._sync_later(self._written)
            self._pool.shutdown()
            opened = [o.fd for o in self._objects.values()]
            opened += [o.fd for o in self._shared.values()]
            for fd in [self.root, *opened]:
                os.close(fd)
            self._staging.close()
            self._objects.clear()
            self._shared.clear()
        for sync in self._syncs:
            sync.result()


def _position(array: ArrayLayout, read_chunk: Shape) -> int:
    """Return a read chunk's place in its object's index, in C order."""
    counts = array.read_chunks_per_write_chunk
    local = tuple(c % n for c, n in zip(read_chunk, counts, strict=True))
    return int(np.ravel_multi_index(local, counts))
