"""A rank's way into the one file of an HDF5 save: read chunks, in its slabs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.containers.appender import Appender
from dcp_zarr.containers.placed import PLACED, Placed
from dcp_zarr.containers.staging import Staging
from dcp_zarr.local_files import BackgroundSync
from dcp_zarr.names import OBJECTS_PATH

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.slabs import Slab


class HDF5Sink:
    """A rank's way into the file.

    Parameters
    ----------
    root
        Descriptor of the partial directory.
    name
        Name of the file in it.
    rank
        Group rank.
    slab
        What of the file is this rank's.
    sync
        Whether read chunks are made durable on closing.
    """

    def __init__(self, root: int, name: str, rank: int, slab: Slab, *, sync: bool) -> None:
        self._root = root
        self._staging = Staging(root, rank)
        self._fd = os.open(name, os.O_WRONLY, dir_fd=root)
        self._appender = Appender(self._fd, slab)
        self._sync = BackgroundSync(self._fd, enabled=sync)
        self._lock = threading.Lock()
        self._placed = Placed()
        self.objects: dict[int, tuple[Buffer, int]] = {}
        """Read chunks of the array of objects, bytes and crc32c: libhdf5 writes them itself."""

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab | None = None,
    ) -> None:
        """Append read chunks, without their checksums, and note where they are."""
        counts = array.read_grid.counts
        positions = [int(np.ravel_multi_index(c, counts)) if c else 0 for c, _ in stored]
        crcs = [int.from_bytes(crc, "little") for _, (*_, crc) in stored]
        content = [encoded for _, (*encoded, _) in stored]
        if array.path == OBJECTS_PATH:
            joined = (b"".join(buffers) for buffers in content)
            self.objects |= dict(zip(positions, zip(joined, crcs, strict=True), strict=True))
            return
        lying = self._appender.append(content)
        rows = zip(positions, lying, crcs, strict=True)
        with self._lock:
            self._placed.add(array.path, [(position, *at, crc) for position, at, crc in rows])
        self._sync.wrote(sum(nbytes for _, nbytes in lying))

    def stage(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into one of the rank's staging files."""
        self._staging.write(name, offset, buffers)

    def close(self) -> None:
        """Leave notes of the read chunks, and make them durable."""
        try:
            if self._placed:
                self.stage(PLACED, 0, [self._placed.encoded()])
        finally:
            try:
                self._sync.close()
            finally:
                os.close(self._fd)
                os.close(self._root)
                self._staging.close()
