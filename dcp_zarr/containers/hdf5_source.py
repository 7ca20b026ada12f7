"""Loading from an HDF5 file.

Stored read chunks are read and decoded without libhdf5, which would do so one by one: a table in
the file tells where they lie, and their checksums tell whether they do. Where another program
wrote the file anew (h5repack), its data sets are read through libhdf5.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from h5py import h5d, h5o, h5s

from dcp_zarr.codecs import CHECKSUM_BYTES, NONE
from dcp_zarr.commit import LocalCommit
from dcp_zarr.container import Extent
from dcp_zarr.containers import hdf5_format
from dcp_zarr.containers.hdf5_build import lying
from dcp_zarr.containers.local_source import LocalSource, open_committed
from dcp_zarr.errors import CorruptionError, DcpZarrError, FormatError, SaveError
from dcp_zarr.garbage import no_collection
from dcp_zarr.local_files import read_all
from dcp_zarr.schema import TensorEntry
from dcp_zarr.schema_json import check_version, schema_from_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import StoredObject
    from dcp_zarr.dtypes import DType
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema

_H5PY_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError)
"""What h5py makes of a damaged file."""
_MAX_NUMBERS = np.array([2**62, 2**62, 2**32], np.uint64)
"""Bounds of offset, size and crc32c."""


class HDF5Source(LocalSource):
    """A committed HDF5 file.

    Parameters
    ----------
    path
        Path of the checkpoint.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        commit = LocalCommit(path)
        super().__init__(str(commit.path), os.fspath(path))
        self._lock = threading.Lock()
        self._rows: dict[str, NDArray[np.int64]] | None = None
        self._fd = open_committed(commit, self._where)
        try:
            self._schema, self._rewritten = self._read_root()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _hdf5(self) -> Iterator[Any]:
        """Open the file with h5py; what it makes of damage is one error."""
        try:
            with hdf5_format.opened(_Reading(self._opened())) as file:
                yield file
        except DcpZarrError:
            raise
        except _H5PY_ERRORS as error:
            raise CorruptionError(
                f"{self._where!r} is not a whole HDF5 file: {error}. Restore it from a copy.",
                path=self._where,
            ) from error

    @no_collection()
    def _read_root(self) -> tuple[Schema, bool]:
        """Return the schema, and whether another program wrote the file anew."""
        with self._hdf5() as file:
            text = hdf5_format.attribute(file)
            if text is None:
                raise FormatError(
                    f"{self._where!r} is an HDF5 file, but not a dcp_zarr checkpoint: its root "
                    "has no text attribute 'dcp_zarr'. Open it with h5py.",
                    path=self._where,
                )
            check_version(_json(text), where=self._where)
            nbytes = os.fstat(self._opened()).st_size
            text = hdf5_format.read_text(file, hdf5_format.SCHEMA, nbytes)
            schema = schema_from_json(_json(text), where=self._where)
            table = h5d.open(file, hdf5_format.READ_CHUNKS.encode())
            rewritten = hdf5_format.table_claims(table)["offset"] != (table.get_offset() or 0)
        if not rewritten:
            return schema, False
        warnings.warn(
            f"{self._where!r} was written anew by another program, such as h5repack: the "
            "checksums in it are of other bytes, and are not checked.",
            stacklevel=5,
        )
        entries = (
            replace(e, codec=NONE) if isinstance(e, TensorEntry) else e for e in schema.entries
        )
        return replace(schema, entries=tuple(entries), objects_codec=NONE), True

    def _table(self) -> dict[str, NDArray[np.int64]]:
        """Return offset, size and crc32c of the read chunks of each array, by path."""
        with self._lock:
            if self._rows is None:
                self._rows = self._read_table()
            return self._rows

    def _read_table(self) -> dict[str, NDArray[np.int64]]:
        arrays = [array for array, _, _ in self._schema.arrays()]
        ends = np.cumsum([hdf5_format.read_chunk_count(array) for array in arrays]).tolist()
        with self._hdf5() as file:
            stored = h5d.open(file, hdf5_format.READ_CHUNKS.encode())
            sound = stored.shape == (ends[-1] if ends else 0, 3)
            table = np.empty(stored.shape if sound else (0, 3), "<u8")
            if table.size:
                stored.read(h5s.ALL, h5s.ALL, table)
            sound &= hdf5_format.table_claims(stored)["sha256"] == hdf5_format.table_digest(table)
        if not sound or (table >= _MAX_NUMBERS).any():
            raise CorruptionError(
                f"The table of read chunks in {self._where!r} was changed after the save. Restore "
                "the file from a copy.",
                path=self._where,
            )
        rows = table.astype(np.int64)
        starts = [0, *ends]
        return {
            array.path: rows[start:end]
            for array, start, end in zip(arrays, starts, ends, strict=False)
        }

    @cached_property
    def _dtypes(self) -> dict[str, DType]:
        return {array.path: dtype for array, dtype, _ in self._schema.arrays()}

    @contextmanager
    def open_object(self, array: ArrayLayout, write_chunk: Shape) -> Iterator[StoredObject]:
        """Open an array: all its read chunks are one object."""
        if not self._rewritten:
            rows, fd = self._table()[array.path], self._opened()
            yield _StoredArray(fd, os.fstat(fd).st_size, array, rows)
            return
        with self._hdf5() as file:
            found = h5d.open(file, array.path.encode())
            expected = hdf5_format.stored_type(self._dtypes[array.path])
            if found.shape != array.shape or found.get_type() != expected:
                raise CorruptionError(f"Data set {array.path!r} has another shape or type.")
            yield _DecodedArray(found, array)

    def damaged_documents(self) -> Iterator[str]:
        """Describe each data set that is missing or not the one that was saved."""
        if self._rewritten:
            yield "The file was written anew by another program: no checksum can be checked."
        with self._hdf5() as file:
            for array, dtype, codec in self._schema.arrays():
                try:
                    yield from self._differences(file, array, dtype, codec)
                except _H5PY_ERRORS as error:
                    yield f"Data set {array.path!r} cannot be read: {error}"
            try:
                h5o.visit(file, lambda _: None)
            except _H5PY_ERRORS as error:
                yield f"The groups cannot be listed: {error}"

    def _differences(
        self,
        file: Any,  # noqa: ANN401
        array: ArrayLayout,
        dtype: DType,
        codec: Codec,
    ) -> Iterator[str]:
        found = h5d.open(file, array.path.encode())
        saved = (
            hdf5_format.digest(hdf5_format.attribute(found)) == self._schema.documents[array.path]
        )
        same_type = found.get_type() == hdf5_format.stored_type(dtype)
        if not saved or not same_type or found.shape != array.shape:
            yield f"Data set {array.path!r} was changed after the save."
        if self._rewritten:
            return
        if not hdf5_format.same_creation(found.get_create_plist(), array, codec):
            yield f"The filters of data set {array.path!r} were changed after the save."
        try:
            told = lying(found, array)
        except SaveError as error:
            yield str(error)
            return
        expected = [
            [offset, nbytes, hdf5_format.filter_mask(array, codec, nbytes)]
            for offset, nbytes, _ in self._table()[array.path].tolist()
        ]
        if told != expected:
            yield f"The index of data set {array.path!r} was changed after the save."


class _Reading:
    """An object like a binary file, for h5py: reads by descriptor, without a shared offset."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        size = os.fstat(self._fd).st_size if whence == os.SEEK_END else 0
        self._position = offset + (0, self._position, size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        got = read_all(self._fd, self._position, [memoryview(buffer)])
        self._position += got
        return got

    def flush(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _StoredArray:
    """An array whose stored read chunks lie where the table says."""

    fd: int
    nbytes: int
    """Size of the file."""
    array: ArrayLayout
    rows: NDArray[np.int64]

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where stored read chunks lie."""
        rows = self.rows[hdf5_format.places(self.array, read_chunks)]
        if (rows[:, :2].sum(axis=1) > self.nbytes).any():
            raise CorruptionError("The file does not hold all of it.")
        return [
            Extent(offset, nbytes, crc.to_bytes(CHECKSUM_BYTES, "little"))
            for offset, nbytes, crc in rows.tolist()
        ]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        if read_all(self.fd, offset, buffers) < sum(map(len, buffers)):
            raise CorruptionError("The file ends before.")


@dataclass(frozen=True, slots=True)
class _DecodedArray:
    """An array that libhdf5 reads and decodes; its read chunks lie one behind the other."""

    found: Any
    array: ArrayLayout

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where decoded read chunks would lie."""
        nbytes = self.array.read_chunk_nbytes
        places = hdf5_format.places(self.array, read_chunks)
        return [Extent(place * nbytes, nbytes, is_checked=False) for place in places.tolist()]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        nbytes = self.array.read_chunk_nbytes
        wanted = sum(map(len, buffers))
        first, last = offset // nbytes, (offset + wanted - 1) // nbytes
        decoded = b"".join(self._read_chunk(place) for place in range(first, last + 1))
        decoded = decoded[offset - first * nbytes :]
        for buffer in buffers:
            buffer[:] = decoded[: len(buffer)]
            decoded = decoded[len(buffer) :]

    def _read_chunk(self, place: int) -> bytes:
        """Return a decoded read chunk; what overhangs the array is zeros."""
        try:
            return self._decode(place)
        except _H5PY_ERRORS as error:
            raise CorruptionError(
                f"libhdf5 cannot decode it: {error}. Where it was saved with 'fast', Blosc or "
                "Zstd, import hdf5plugin first."
            ) from error

    def _decode(self, place: int) -> bytes:
        array = self.array
        bits = np.zeros(array.read_chunk_shape, f"V{array.itemsize}")
        space = self.found.get_space()
        if array.shape:
            coordinates = tuple(map(int, np.unravel_index(place, array.read_grid.counts)))
            box = array.read_grid.box(coordinates)
            space.select_hyperslab(box.offsets, box.sizes)
            part = np.empty(box.sizes, bits.dtype)
            self.found.read(h5s.create_simple(box.sizes), space, part, mtype=self.found.get_type())
            bits[tuple(slice(0, n) for n in box.sizes)] = part
        else:
            self.found.read(h5s.ALL, h5s.ALL, bits, mtype=self.found.get_type())
        return bits.tobytes()


def _json(text: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the schema is no JSON of a schema") from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Say whether a file is an HDF5 file with a schema, of any version, sound or not."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with hdf5_format.opened(_Reading(fd)) as file:
            return hdf5_format.attribute(file) is not None
    except _H5PY_ERRORS:
        return False
    finally:
        os.close(fd)
