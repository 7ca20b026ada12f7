"""Saving into a Zarr v3 directory store on a local or shared file system.

A rank looks names up relative to the directory that it opened, so that it stays with its own save
whatever is renamed meanwhile.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dcp_zarr import names, zarr_format
from dcp_zarr.commit import LocalCommit
from dcp_zarr.containers import placed
from dcp_zarr.containers.directory_sink import BATCH_FILES, SYNC_THREADS, DirectorySink
from dcp_zarr.errors import CheckpointExistsError, CorruptionError, OptionError, SaveError
from dcp_zarr.local_files import sync_directory, sync_file, write_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema


_MAX_NAME_BYTES = 230
"""A file system allows 255; the hidden siblings have longer names."""

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
        self._placed_by: dict[int, Mapping[str, NDArray[np.int64]]] = {}

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

    def join(self, array: ArrayLayout, counts: Mapping[int, int]) -> None:
        """Complete the object that several ranks wrote. Coordinator only."""
        rows = []
        for rank, count in counts.items():
            rows.append(self._placed(rank).get(array.path, np.empty((0, 3), np.int64)))
            if len(rows[-1]) != count:
                raise self._not_visible(rank)
        write_chunk = (0,) * len(array.shape)
        path = f"{self._commit.partial}/{array.path}/{zarr_format.object_key(array, write_chunk)}"
        fd = os.open(path, os.O_RDWR)
        try:
            extents = placed.close_gaps(fd, placed.extents(array, np.concatenate(rows)))
            end = int(extents.sum(axis=1).max())
            index = zarr_format.encode_index(extents)
            write_all(fd, end, [index])
            os.ftruncate(fd, end + len(index))
            if self._sync:
                sync_file(fd)
        finally:
            os.close(fd)

    def _placed(self, rank: int) -> Mapping[str, NDArray[np.int64]]:
        """Return what a rank placed in shared objects, by path of the array."""
        if rank not in self._placed_by:
            path = self._commit.staging / f"{rank}.{placed.PLACED}"
            try:
                self._placed_by[rank] = placed.decode(path.read_bytes())
            except (FileNotFoundError, CorruptionError) as error:
                raise self._not_visible(rank) from error
        return self._placed_by[rank]

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
        with ThreadPoolExecutor(SYNC_THREADS if self._sync else 1) as pool:
            write = functools.partial(_write_documents, sync=self._sync)
            _in_batches(pool, write, list(zip(directories, documents.values(), strict=True)))
            write([(str(partial), root)])
            if self._sync:
                _in_batches(pool, _sync_directories, directories)
        self._commit.commit(sync=self._sync)


def _in_batches(pool: Executor, work: Callable[[list[Item]], None], items: list[Item]) -> None:
    """Have a pool do the work, many items at a time."""
    starts = range(0, len(items), BATCH_FILES)
    list(pool.map(work, [items[start : start + BATCH_FILES] for start in starts]))


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
