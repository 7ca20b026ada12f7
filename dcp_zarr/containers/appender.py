"""Appending to one's slabs of a file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr.local_files import write_all
from dcp_zarr.slabs import SlabCursor

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer
    from dcp_zarr.slabs import Slab


class Appender:
    """Appends to a writer's slabs of a file; may be used from several threads.

    Parameters
    ----------
    fd
        The file.
    slab
        What of it is this writer's.
    """

    def __init__(self, fd: int, slab: Slab) -> None:
        self._fd = fd
        self._cursor = SlabCursor(slab)
        self._lock = threading.Lock()

    def append(self, stored: Sequence[Sequence[Buffer]]) -> list[tuple[int, int]]:
        """Write what is given, each part in one place; return offset and size of each."""
        sizes = [sum(map(len, buffers)) for buffers in stored]
        with self._lock:
            offsets = [self._cursor.take(nbytes) for nbytes in sizes]
        pending: list[Buffer] = []
        start = end = offsets[0]
        for buffers, offset, nbytes in zip(stored, offsets, sizes, strict=True):
            if offset != end:
                write_all(self._fd, start, pending)
                start, pending = offset, []
            pending += buffers
            end = offset + nbytes
        write_all(self._fd, start, pending)
        return list(zip(offsets, sizes, strict=True))
