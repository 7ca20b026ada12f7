"""Loading from a Zarr v3 store, wherever its objects lie."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import names, zarr_format
from dcp_zarr.container import Extent
from dcp_zarr.containers.local_source import LocalSource
from dcp_zarr.errors import CorruptionError
from dcp_zarr.local_files import read_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema


class ZarrDocuments(ABC):
    """The documents of a committed Zarr store."""

    _schema: Schema

    @abstractmethod
    def _read(self, key: str) -> bytes:
        """Return a whole object; raise FileNotFoundError where there is none."""

    @abstractmethod
    def _is_replaced(self) -> bool:
        """Say whether another checkpoint, or none, stands there now."""

    def damaged_documents(self) -> Iterator[str]:
        """Describe each document that is missing or not the one that was saved."""
        group = zarr_format.document_digest(zarr_format.group_document())
        groups = dict.fromkeys(names.parents(self._schema.documents), group)
        for path, digest in {**groups, **self._schema.documents}.items():
            try:
                self._check_document(path, digest)
            except (CorruptionError, OSError) as error:
                yield str(error)

    def _missing(self, key: str) -> CorruptionError:
        gone = " because the checkpoint was replaced while it was read"
        return CorruptionError(f"{key!r} is missing{gone if self._is_replaced() else ''}.")

    def _check_document(self, path: str, digest: str) -> None:
        """Raise unless the document of an array or group is the one that was saved."""
        key = f"{path}/{zarr_format.DOCUMENT}"
        try:
            found = zarr_format.document_digest(self._read(key))
        except FileNotFoundError as error:
            raise self._missing(key) from error
        if found != digest:
            raise CorruptionError(f"{key!r} was changed after the save.")


class ZarrSource(LocalSource, ZarrDocuments):
    """A committed Zarr store in files.

    Parameters
    ----------
    path
        Path of the checkpoint, with links resolved.
    where
        The path as it was given, for messages.
    """

    def __init__(self, path: str, where: str) -> None:
        super().__init__(path, where)
        self._checked: set[str] = set()

    @abstractmethod
    def _open(self, key: str) -> AbstractContextManager[FileRange]:
        """Open an object; raise FileNotFoundError where there is none."""

    @contextmanager
    def open_object(self, array: ArrayLayout, write_chunk: Shape) -> Iterator[_StoredObject]:
        """Open a write chunk's object, and read its index."""
        if array.path not in self._checked:
            self._check_document(array.path, self._schema.documents[array.path])
            self._checked.add(array.path)
        key = zarr_format.object_path(array, write_chunk)
        try:
            opened = self._open(key)
            extent = opened.__enter__()
        except FileNotFoundError as error:
            raise self._missing(key) from error
        try:
            yield _StoredObject.open(extent, key, array)
        finally:
            opened.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of a file that are an object."""

    fd: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _StoredObject:
    """An open object of a store."""

    at: FileRange
    key: str
    array: ArrayLayout
    index: NDArray[np.uint64] | None

    @classmethod
    def open(cls, at: FileRange, key: str, array: ArrayLayout) -> _StoredObject:
        if not zarr_format.has_index(array):
            return cls(at, key, array, None)
        nbytes = min(zarr_format.index_nbytes(array), at.nbytes)
        encoded = os.pread(at.fd, nbytes, at.start + at.nbytes - nbytes)
        return cls(at, key, array, zarr_format.decode_index(encoded, array))

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where stored read chunks lie."""
        if self.index is None:
            return [Extent(0, self.at.nbytes)] * len(read_chunks)
        inside = np.array(read_chunks) % self.array.read_chunks_per_write_chunk
        found = [Extent(*extent) for extent in self.index[tuple(inside.T)].tolist()]
        if any(extent.offset + extent.nbytes > self.at.nbytes for extent in found):
            raise CorruptionError(f"{self.key!r} does not hold all of it.")
        return found

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        wanted = sum(map(len, buffers))
        got = read_all(self.at.fd, self.at.start + offset, buffers)
        if got < wanted or offset + wanted > self.at.nbytes:
            raise CorruptionError(f"{self.key!r} ends at byte {min(offset + got, self.at.nbytes)}.")
