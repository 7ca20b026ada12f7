"""Saving into a Zarr v3 directory store on a local or shared file system.

A rank looks names up relative to the directory that it opened, so that it stays with its own save
whatever is renamed meanwhile.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dcp_zarr import names, zarr_format
from dcp_zarr.commit import STAGING, LocalCommit
from dcp_zarr.errors import CheckpointExistsError, OptionError, SaveError
from dcp_zarr.local_files import sync_directory, sync_file, write_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema


_MAX_NAME_BYTES = 230
"""A file system allows 255; the hidden siblings have longer names."""
_SYNC_THREADS = 8
"""Threads that wait for files to become durable; the file system joins their waits."""
_MAX_UNSYNCED_FILES = 256
"""Files that may be open while they wait for that."""
_BATCH_FILES = 16
"""Small files that one thread makes durable in turn."""
_LARGE_FILE_BYTES = 1 << 20
"""A file of that size is made durable at once."""

Item = TypeVar("Item")


class DirectoryTarget:
    """A Zarr directory to be.

    Parameters
    ----------
    path
        Where it shall stand.
    overwrite
        Whether a checkpoint that stands there may be replaced.
    sync
        Whether bytes are made durable before the commit.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, sync: bool) -> None:
        self._commit = LocalCommit(path)
        self._overwrite = overwrite
        self._sync = sync

    @property
    def where(self) -> str:
        """Path of the checkpoint."""
        return str(self._commit.path)

    def prepare(self) -> None:
        """Check what stands at the path, and make the partial directory. Coordinator only."""
        path = self._commit.path
        self._check_name(path)
        self._commit.recover()
        if path.exists() and not _replaceable(path):
            raise CheckpointExistsError(
                f"{self.where!r} exists and is not a dcp_zarr checkpoint; nothing was written. "
                "Remove it, or save to another path.",
                path=self.where,
            )
        if path.exists() and not self._overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {self.where!r} and overwrite=False.",
                path=self.where,
            )
        self._commit.prepare()

    def _check_name(self, path: Path) -> None:
        """Raise where a directory could not be swapped into the path."""
        reason = None
        if path.is_mount():
            reason = "is a mount point, which no directory can replace; save below it"
        elif len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
            reason = f"has a name of more than {_MAX_NAME_BYTES} bytes; choose a shorter one"
        if reason is not None:
            raise OptionError(f"{self.where!r} {reason}.", path=self.where)

    def discard(self) -> None:
        """Remove what a save left that was given up. Coordinator only."""
        self._commit.discard()

    def open_sink(self, rank: int) -> DirectorySink:
        """Open the partial directory for a rank."""
        try:
            root = os.open(self._commit.partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise SaveError(
                f"Rank {rank} does not see {str(self._commit.partial)!r}, which the coordinator "
                "made: is the path shared by all hosts?",
                rank=rank,
                path=self.where,
            ) from error
        return DirectorySink(root, rank, sync=self._sync)

    def read_staged(self, rank: int, name: str, offset: int, nbytes: int) -> bytes:
        """Read from a rank's staging file. Coordinator only."""
        path = self._commit.staging / f"{rank}.{name}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise self._not_visible(rank) from error
        try:
            return os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)

    def check_placed(self, array: ArrayLayout, ranks: Mapping[Shape, int]) -> None:
        """Raise unless an array's objects are all there. Coordinator only."""
        expected = {zarr_format.object_key(array, w): rank for w, rank in ranks.items()}
        found: set[str] = set()
        with suppress(FileNotFoundError):
            found.update(os.listdir(f"{self._commit.partial}/{array.path}"))
        for key, rank in expected.items():
            if key not in found:
                raise self._not_visible(rank)
        if strays := found - expected.keys():
            raise SaveError(
                f"{min(strays)!r} of tensor {array.fqn!r} in {self.where!r} was written by "
                "no rank of this save; another job may be saving to the same path.",
                fqn=array.fqn,
                path=self.where,
            )

    def _not_visible(self, rank: int) -> SaveError:
        return SaveError(
            f"Rank {rank}'s files are not visible from the coordinator below {self.where!r}: is "
            "the path shared by all hosts?",
            rank=rank,
            path=self.where,
        )

    def commit(self, schema: Schema) -> None:
        """Write all documents, the root last, and swap. Coordinator only."""
        partial = self._commit.partial
        self._commit.check_unchanged()
        documents = dict(zarr_format.array_documents(schema))
        groups = names.parents(documents)
        digests = {path: zarr_format.document_digest(d) for path, d in documents.items()}
        for path in [*groups, *documents]:
            with suppress(FileExistsError):
                os.mkdir(f"{partial}/{path}")
        documents |= dict.fromkeys(groups, zarr_format.group_document())
        root = zarr_format.root_document(replace(schema, documents=digests))
        directories = [f"{partial}/{path}" for path in documents]
        with ThreadPoolExecutor(_SYNC_THREADS if self._sync else 1) as pool:
            write = functools.partial(_write_documents, sync=self._sync)
            _in_batches(pool, write, list(zip(directories, documents.values(), strict=True)))
            write([(str(partial), root)])
            if self._sync:
                _in_batches(pool, _sync_directories, directories)
        self._commit.commit(sync=self._sync)


def _in_batches(pool: Executor, work: Callable[[list[Item]], None], items: list[Item]) -> None:
    """Have a pool do the work, many items at a time."""
    starts = range(0, len(items), _BATCH_FILES)
    list(pool.map(work, [items[start : start + _BATCH_FILES] for start in starts]))


def _write_documents(documents: list[tuple[str, bytes]], *, sync: bool) -> None:
    """Write documents of groups and arrays, by directory, and make them durable."""
    for directory, document in documents:
        path = f"{directory}/{zarr_format.DOCUMENT}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, 0, [document])
            if sync:
                sync_file(fd)
        finally:
            os.close(fd)


def _sync_directories(paths: list[str]) -> None:
    for path in paths:
        sync_directory(path)


def _replaceable(path: Path) -> bool:
    """Say whether a path holds a checkpoint of ours, or nothing."""
    if not path.is_dir():
        return False
    try:
        return zarr_format.is_checkpoint((path / zarr_format.DOCUMENT).read_bytes())
    except FileNotFoundError:
        return not any(path.iterdir())


@dataclass(slots=True)
class _OpenObject:
    """A write chunk that is being written."""

    fd: int
    extents: NDArray[np.uint64]
    missing: int
    end: int = 0


@dataclass
class DirectorySink:
    """A rank's way into the partial directory."""

    root: int
    """Descriptor of the partial directory."""
    rank: int
    """Group rank."""
    sync: bool
    """Whether objects are made durable as they are completed."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _directories: set[str] = field(default_factory=set)
    _objects: dict[tuple[str, Shape], _OpenObject] = field(default_factory=dict)
    _staging: dict[str, int] = field(default_factory=dict)
    _written: list[int] = field(default_factory=list)
    _syncs: list[Future[None]] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_SYNC_THREADS))
    _open_files: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(_MAX_UNSYNCED_FILES)
    )

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
    ) -> None:
        """Append read chunks to their object; the last to come writes the index."""
        if not zarr_format.has_index(array):
            ((_, buffers),) = stored
            self._complete(self._create(array, write_chunk), 0, buffers)
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

    def _begin(self, array: ArrayLayout, write_chunk: Shape) -> _OpenObject:
        counts = array.read_chunks_per_write_chunk
        extents = np.full((prod(counts), 2), zarr_format.MISSING, np.uint64)
        missing = array.read_chunks_of(write_chunk).volume
        written = _OpenObject(self._create(array, write_chunk), extents, missing)
        self._objects[array.path, write_chunk] = written
        return written

    def _create(self, array: ArrayLayout, write_chunk: Shape) -> int:
        self._make_directories(array.path)
        path = f"{array.path}/{zarr_format.object_key(array, write_chunk)}"
        return _create(path, self.root)

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
        if not self.sync:
            os.close(fd)
            return
        self._open_files.acquire()
        large = offset + sum(map(len, buffers)) >= _LARGE_FILE_BYTES
        with self._lock:
            self._written.append(fd)
            batch = self._written if large or len(self._written) >= _BATCH_FILES else []
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
        with self._lock:
            if name not in self._staging:
                self._staging[name] = _create(f"{STAGING}/{self.rank}.{name}", self.root)
        write_all(self._staging[name], offset, buffers)

    def close(self) -> None:
        """Wait until all is durable, and close all files.

        Objects that never got all their read chunks stay incomplete.
        """
        self._sync_later(self._written)
        self._pool.shutdown()
        fds = [self.root, *self._staging.values(), *(o.fd for o in self._objects.values())]
        self._staging.clear()
        self._objects.clear()
        for fd in fds:
            os.close(fd)
        for sync in self._syncs:
            sync.result()


def _create(path: str, dir_fd: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=dir_fd)
    except FileExistsError as error:
        raise SaveError(
            f"{path!r} exists already in the save's own directory: two jobs are saving to one "
            "path, or one rank was started twice.",
            path=path,
        ) from error


def _position(array: ArrayLayout, read_chunk: Shape) -> int:
    """Return a read chunk's place in its object's index, in C order."""
    counts = array.read_chunks_per_write_chunk
    local = tuple(c % n for c, n in zip(read_chunk, counts, strict=True))
    return int(np.ravel_multi_index(local, counts))
