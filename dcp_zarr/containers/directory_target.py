"""Saving into a Zarr v3 directory store on a local or shared file system.

A rank looks names up relative to the directory that it opened, so that it stays with its own save
whatever is renamed meanwhile.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dcp_zarr import zarr_format
from dcp_zarr.containers import placed
from dcp_zarr.containers.directory_sink import BATCH_FILES, SYNC_THREADS, DirectorySink
from dcp_zarr.containers.gaps import close_gaps
from dcp_zarr.containers.local_target import LocalTarget
from dcp_zarr.errors import SaveError
from dcp_zarr.local_files import sync_file, sync_path, write_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema, TensorEntry
    from dcp_zarr.slabs import Slab


Item = TypeVar("Item")


class DirectoryTarget(LocalTarget):
    """A Zarr directory to be."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, sync: bool) -> None:
        super().__init__(path, overwrite=overwrite, sync=sync)
        self._shared: placed.Shared | None = None
        self._joined: list[str] = []

    _kind = "a Zarr directory"

    def _replaceable(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        try:
            return zarr_format.is_checkpoint((path / zarr_format.DOCUMENT).read_bytes())
        except FileNotFoundError:
            return not any(path.iterdir())

    def reserved_nbytes(self, tensors: Iterable[TensorEntry]) -> None:
        """Return None: a directory is not one file."""

    def open_sink(self, rank: int, slab: Slab | None = None) -> DirectorySink:
        """Open the partial directory for a rank."""
        return DirectorySink(self._open_partial(rank), rank, sync=self._sync)

    def open_last_sink(self, ranks: int, tensors: Iterable[TensorEntry]) -> DirectorySink:
        """Open the coordinator's own. Coordinator only."""
        self._commit.check_unchanged()
        return self.open_sink(ranks)

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

    def join(self, array: ArrayLayout, counts: NDArray[np.int64]) -> None:
        """Complete the object that several ranks wrote. Coordinator only."""
        if self._shared is None:
            notes = (self._read_notes(rank, placed.PLACED) for rank in range(len(counts)))
            self._shared = placed.Shared.of(notes, self._not_visible)
        found = self._shared.rows(array.path)
        wrong = np.flatnonzero(np.bincount(found[:, 0], minlength=len(counts)) != counts)
        if wrong.size:
            raise self._not_visible(int(wrong[0]))
        key = zarr_format.object_path(array, (0,) * len(array.shape))
        path = f"{self._commit.partial}/{key}"
        fd = os.open(path, os.O_RDWR)
        try:
            extents = close_gaps(fd, placed.extents(array, found[:, 1:]))
            end = int(extents.sum(axis=1).max())
            index = zarr_format.encode_index(extents)
            write_all(fd, end, [index])
            os.ftruncate(fd, end + len(index))
        finally:
            os.close(fd)
        self._joined.append(path)

    def commit(self, schema: Schema) -> None:
        """Write all documents, the root last, and swap. Coordinator only."""
        partial = self._commit.partial
        self._commit.check_unchanged()
        *documents, (_, root) = zarr_format.store_documents(schema)
        directories = [
            f"{partial}/{key.removesuffix(zarr_format.DOCUMENT)}" for key, _ in documents
        ]
        for directory in directories:
            with suppress(FileExistsError):
                os.mkdir(directory)
        with ThreadPoolExecutor(SYNC_THREADS if self._sync else 1) as pool:
            write = functools.partial(_write_documents, sync=self._sync)
            _in_batches(pool, write, [(f"{partial}/{key}", content) for key, content in documents])
            write([(f"{partial}/{zarr_format.DOCUMENT}", root)])
            if self._sync:
                _in_batches(pool, _sync_paths, [*self._joined, *directories])
        self._commit.commit(sync=self._sync)


def _in_batches(pool: Executor, work: Callable[[list[Item]], None], items: list[Item]) -> None:
    """Have a pool do the work, many items at a time."""
    starts = range(0, len(items), BATCH_FILES)
    list(pool.map(work, [items[start : start + BATCH_FILES] for start in starts]))


def _write_documents(documents: list[tuple[str, bytes]], *, sync: bool) -> None:
    """Write documents, by path, and make them durable."""
    for path, document in documents:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, 0, [document])
            if sync:
                sync_file(fd)
        finally:
            os.close(fd)


def _sync_paths(paths: list[str]) -> None:
    for path in paths:
        sync_path(path)
