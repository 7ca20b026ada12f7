"""Saving into one HDF5 file on a local or shared file system.

All ranks write read chunks at once, each in its own slabs, without libhdf5. The coordinator has it
make the rest around them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.containers import hdf5_assembly, hdf5_format, placed
from dcp_zarr.containers.gaps import close_gaps
from dcp_zarr.containers.hdf5_sink import HDF5Sink
from dcp_zarr.containers.hdf5_source import is_checkpoint
from dcp_zarr.containers.one_file_target import FILE, OneFileTarget
from dcp_zarr.errors import CorruptionError, SaveError, UnsupportedTensorError
from dcp_zarr.local_files import sync_file, sync_path

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema, TensorEntry
    from dcp_zarr.slabs import Slab

logger = logging.getLogger(__name__)

_COPY = "copy"
"""Name of the file in the partial directory that read chunks are copied to."""
_COLUMNS = 4
"""Numbers in a rank's notes for each read chunk: place in its grid, offset, size, crc32c."""


class HDF5Target(OneFileTarget):
    """An HDF5 file to be."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, sync: bool) -> None:
        super().__init__(path, overwrite=overwrite, sync=sync)
        self._placed_by: dict[int, tuple[list[str], NDArray[np.int64]]] = {}
        self._paths_by: dict[int, set[str]] = {}
        self._last: HDF5Sink | None = None

    _kind = "an HDF5 file"

    def _replaceable(self, path: Path) -> bool:
        return path.is_file() and (not path.stat().st_size or is_checkpoint(path))

    def _front_nbytes(self, tensors: Iterable[TensorEntry]) -> int:
        """Return what libhdf5 needs in front of all read chunks.

        Raises
        ------
        UnsupportedTensorError
            If a tensor has more axes than HDF5 knows.
        """
        planned = list(tensors)
        for entry in planned:
            if len(entry.array.shape) > hdf5_format.MAX_AXES:
                raise UnsupportedTensorError(
                    f"Tensor {entry.fqn!r} has {len(entry.array.shape)} axes, and HDF5 knows "
                    f"{hdf5_format.MAX_AXES} at most; reshape it, or save to a path that ends in "
                    ".zarr.",
                    fqn=entry.fqn,
                )
        return hdf5_format.metadata_nbytes(planned, self._ranks)

    def _sink(self, root: int, rank: int, slab: Slab, *, sync: bool) -> HDF5Sink:
        self._last = HDF5Sink(root, FILE, rank, slab, sync=sync)
        return self._last

    def _end(self, ranks: int) -> int:
        ends = (self._notes(rank)[1][:, 2:4].sum(axis=1) for rank in range(ranks))
        return max((int(of_rank.max(initial=0)) for of_rank in ends), default=0)

    def _notes(self, rank: int) -> tuple[list[str], NDArray[np.int64]]:
        """Return what a rank placed: paths of arrays, and for each read chunk the number of one.

        Beside that number stand place in its grid, offset, size and crc32c.
        """
        if rank not in self._placed_by:
            staged = self._read_notes(rank, placed.PLACED)  # a rank without items has none
            nothing: tuple[list[str], NDArray[np.int64]] = [], np.empty((0, 1 + _COLUMNS), np.int64)
            try:
                self._placed_by[rank] = placed.decode(staged, _COLUMNS) if staged else nothing
            except CorruptionError as error:
                raise self._not_visible(rank) from error
        return self._placed_by[rank]

    def check_placed(self, array: ArrayLayout, ranks: Mapping[Shape, int]) -> None:
        """Raise unless each rank's notes tell of the array. Coordinator only."""
        for rank in set(ranks.values()):
            if array.path not in self._paths(rank):
                raise self._not_visible(rank)

    def _paths(self, rank: int) -> set[str]:
        if rank not in self._paths_by:
            self._paths_by[rank] = set(self._notes(rank)[0])
        return self._paths_by[rank]

    def commit(self, schema: Schema) -> None:
        """Have libhdf5 make the file, and rename it. Coordinator only."""
        self._commit.check_unchanged()
        fd = os.open(self._commit.partial / FILE, os.O_RDWR)
        name = FILE
        try:
            rows = self._rows(schema)
            if len(rows):
                lying = rows[:, 2:4].astype(np.uint64)
                rows[:, 2:4] = close_gaps(fd, lying, self._reserved or 0)
                rows = rows[rows[:, 2].argsort()]
            objects = self._last.objects if self._last is not None else {}
            contents = hdf5_assembly.Contents(schema, rows, objects)
            try:
                hdf5_assembly.in_place(fd, contents)
                if self._sync:
                    sync_file(fd)
            except hdf5_assembly.MisplacedError as error:
                logger.warning("%s: %s Its data is copied instead.", self.where, error)
                name = _COPY
                hdf5_assembly.copied(fd, self._commit.partial / name, contents)
                if self._sync:
                    sync_path(self._commit.partial / name)
        finally:
            os.close(fd)
        self._commit.commit_file(name, sync=self._sync)

    def _rows(self, schema: Schema) -> NDArray[np.int64]:
        """Return all that was placed: number of the tensor, place, offset, size and crc32c.

        Raises
        ------
        SaveError
            If a read chunk is missing, was placed twice, or shares a byte with another.
        """
        arrays = [entry.array for entry in schema.tensors.values()]
        numbers = {array.path: number for number, array in enumerate(arrays)}
        found = []
        for paths, noted in map(self._notes, range(self._ranks + 1)):
            of_paths = np.array([numbers.get(path, -1) for path in paths], np.int64)
            found.append(np.column_stack([of_paths[noted[:, 0]], noted[:, 1:]]))
        rows = np.concatenate(found)
        counts = [hdf5_format.read_chunk_count(array) for array in arrays]
        expected = np.repeat(np.arange(len(arrays)), counts)
        places = np.concatenate([np.arange(0), *map(np.arange, counts)])
        in_order = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        each_once = np.array_equal(in_order[:, :2], np.stack([expected, places], axis=1))
        rows = rows[rows[:, 2].argsort()]
        if not each_once or (rows[1:, 2] < rows[:-1, 2:4].sum(axis=1)).any():
            raise SaveError(
                "What the ranks wrote is not each read chunk once; the save is given up. Another "
                "job may be saving to the same path.",
                path=self.where,
            )
        return rows
