"""Objects that are stored in one act, and so wait until all their read chunks are there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import zarr_format

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape

    Stored = Sequence[tuple[Shape, Sequence[Buffer]]]


class WholeObjects:
    """Write chunks of which some read chunks are still to come; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, Shape], list[tuple[Shape, Sequence[Buffer]]]] = {}

    def whole(
        self, array: ArrayLayout, write_chunk: Shape, stored: Stored
    ) -> Sequence[Buffer] | None:
        """Return an object, its index at the end; None where read chunks are still to come."""
        whole = self._whole(array, write_chunk, stored)
        if whole is None:
            return None
        content = [buffer for _, buffers in whole for buffer in buffers]
        if zarr_format.has_index(array):
            content.append(zarr_format.encode_index(_extents(array, whole)))
        return content

    def _whole(self, array: ArrayLayout, write_chunk: Shape, stored: Stored) -> Stored | None:
        count = array.read_chunks_of(write_chunk).volume if zarr_format.has_index(array) else 1
        if len(stored) == count:
            return stored
        with self._lock:
            waiting = self._waiting.setdefault((array.path, write_chunk), [])
            waiting += [(c, [bytes(buffer) for buffer in buffers]) for c, buffers in stored]
            if len(waiting) < count:
                return None
            return self._waiting.pop((array.path, write_chunk))


def _extents(array: ArrayLayout, stored: Stored) -> NDArray[np.uint64]:
    """Return the index of an object whose read chunks follow one another."""
    counts = array.read_chunks_per_write_chunk
    extents = np.full((*counts, 2), zarr_format.MISSING, np.uint64)
    offset = 0
    for read_chunk, buffers in stored:
        nbytes = sum(map(len, buffers))
        extents[tuple(c % n for c, n in zip(read_chunk, counts, strict=True))] = offset, nbytes
        offset += nbytes
    return extents.reshape(prod(counts), 2)
