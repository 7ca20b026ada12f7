"""Loading from an object store, in as few requests as may be.

Opening reads the root document. An object that is wanted whole is one request; of another its index
is read, once, and what is wanted of it, neighbours together. The root is asked for again behind all
reads: a save deletes it before it touches anything else, so what was read is of one save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import zarr_format
from dcp_zarr.container import Extent
from dcp_zarr.containers.fetched import Fetched
from dcp_zarr.containers.object_store import NETWORK_CALLS, opened, ranges_of
from dcp_zarr.containers.object_store_target import MARK
from dcp_zarr.containers.zarr_source import ZarrDocuments
from dcp_zarr.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    DcpZarrError,
    IncompleteCheckpointError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.containers.object_store import ObjectStore, Place
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema

_SMALL_OBJECT_BYTES = 1 << 20
"""An object of that size, uncompressed, is always read whole: it takes as long as its index."""
_LARGEST_GAP_BYTES = 1 << 20
"""What lies no further apart is read in one request: a request takes as long as this."""
_KEPT_INDEX_BYTES = 64 << 20


class ObjectStoreSource(ZarrDocuments):
    """A committed checkpoint in an object store.

    Parameters
    ----------
    place
        Where.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    StoreError
        If the store refuses or fails.
    """

    network_calls = NETWORK_CALLS

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: ObjectStore | None = opened(place)
        self._where = self._store.where
        try:
            self._root = self._store.read(zarr_format.DOCUMENT)
        except FileNotFoundError as error:
            raise self._nothing(self._store) from error
        self._schema = zarr_format.read_root(bytes(self._root.buffer), where=self._where)
        self._indexes: Fetched[tuple[NDArray[np.uint64], int]] = Fetched(
            _KEPT_INDEX_BYTES, lambda found: found[0].nbytes
        )

    def _nothing(self, store: ObjectStore) -> DcpZarrError:
        try:
            store.read(MARK)
        except FileNotFoundError:
            return CheckpointNotFoundError(
                f"There is no checkpoint at {self._where!r}: it has no zarr.json.",
                path=self._where,
            )
        return IncompleteCheckpointError(
            f"The save to {self._where!r} is under way, or never finished. Load an older "
            "checkpoint.",
            path=self._where,
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Open it again where it is unpickled."""
        return _reopen, (self._place, self._schema.save_id)

    @property
    def where(self) -> str:
        """Address of the checkpoint."""
        return self._where

    @property
    def schema(self) -> Schema:
        """The schema, read on opening."""
        return self._schema

    @property
    def _objects(self) -> ObjectStore:
        if self._store is None:
            raise DcpZarrError(f"{self._where!r} was closed; open it again.", path=self._where)
        return self._store

    def _read(self, key: str) -> bytes:
        return bytes(self._objects.read(key).buffer)

    def _is_replaced(self) -> bool:
        return not self._objects.is_unchanged(zarr_format.DOCUMENT, self._root)

    def check_unchanged(self) -> None:
        """Raise where another save to the same place has begun."""
        if self._is_replaced():
            raise CorruptionError(
                f"{self._where!r} was replaced while it was read; open it again.",
                path=self._where,
            )

    @contextmanager
    def open_object(self, array: ArrayLayout, write_chunk: Shape) -> Iterator[_RemoteObject]:
        """Open a write chunk; nothing is read yet."""
        key = zarr_format.object_path(array, write_chunk)
        try:
            yield _RemoteObject(self._objects, key, array, write_chunk, self._indexes)
        except FileNotFoundError as error:
            raise self._missing(key) from error

    def close(self) -> None:
        """Let go of the store."""
        self._store = None


class _RemoteObject:
    """A write chunk in a store."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        array: ArrayLayout,
        write_chunk: Shape,
        indexes: Fetched[tuple[NDArray[np.uint64], int]],
    ) -> None:
        self._store = store
        self._key = key
        self._array = array
        self._write_chunk = write_chunk
        self._indexes = indexes
        self._parts: list[tuple[int, memoryview]] = []

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where stored read chunks lie, and fetch them."""
        array = self._array
        if not zarr_format.has_index(array):
            whole = self._fetch_whole()
            return [Extent(0, len(whole))] * len(read_chunks)
        count = prod(array.read_chunks_per_write_chunk)
        is_small = count * array.read_chunk_nbytes <= _SMALL_OBJECT_BYTES
        if is_small or len(read_chunks) == array.read_chunks_of(self._write_chunk).volume:
            whole = self._fetch_whole()
            end = bytes(whole[-zarr_format.index_nbytes(array) :])
            return self._lying(zarr_format.decode_index(end, array), len(whole), read_chunks)
        found = self._lying(*self._indexes.get(self._key, self._read_index), read_chunks)
        ranges = ranges_of(((e.offset, e.nbytes) for e in found), _LARGEST_GAP_BYTES)
        parts = self._store.read_ranges(self._key, ranges)
        self._parts = [(start, part) for (start, _), part in zip(ranges, parts, strict=True)]
        return found

    def _fetch_whole(self) -> memoryview:
        whole = self._store.read(self._key).buffer
        self._parts = [(0, whole)]
        return whole

    def _read_index(self) -> tuple[NDArray[np.uint64], int]:
        end = self._store.read_end(self._key, zarr_format.index_nbytes(self._array))
        return zarr_format.decode_index(bytes(end.buffer), self._array), end.nbytes

    def _lying(
        self, index: NDArray[np.uint64], nbytes: int, read_chunks: Sequence[Shape]
    ) -> list[Extent]:
        inside = np.array(read_chunks) % self._array.read_chunks_per_write_chunk
        found = [Extent(*extent) for extent in index[tuple(inside.T)].tolist()]
        if any(extent.offset + extent.nbytes > nbytes for extent in found):
            raise CorruptionError(f"{self._key!r} does not hold all of it.")
        return found

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on, which have been fetched."""
        start, part = max(fetched for fetched in self._parts if fetched[0] <= offset)
        for buffer in buffers:
            content = part[offset - start : offset - start + len(buffer)]
            if len(content) < len(buffer):
                raise CorruptionError(f"{self._key!r} ends at byte {offset + len(content)}.")
            buffer[:] = content
            offset += len(buffer)


def _reopen(place: Place, save_id: str) -> ObjectStoreSource:
    """Open a checkpoint that was pickled open.

    Raises
    ------
    CorruptionError
        If another save stands there now.
    """
    source = ObjectStoreSource(place)
    if source.schema.save_id != save_id:
        raise CorruptionError(f"{source.where!r} was replaced since it was opened; open it again.")
    return source
