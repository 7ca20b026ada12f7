"""A rank's way into the one file of an HDF5 save: read chunks, in its slabs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr.containers.appender import Appender
from dcp_zarr.containers.hdf5_format import places
from dcp_zarr.containers.one_file_sink import OneFileSink
from dcp_zarr.containers.placed import PLACED, Placed
from dcp_zarr.names import OBJECTS_PATH

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.slabs import Slab


class HDF5Sink(OneFileSink):
    """A rank's way into the file; parameters are those of `OneFileSink`, and the rank's slab."""

    def __init__(self, root: int, name: str, rank: int, slab: Slab, *, sync: bool) -> None:
        super().__init__(root, name, rank, sync=sync)
        self._appender = Appender(self._fd, slab)
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
        positions = places(array, [read_chunk for read_chunk, _ in stored]).tolist()
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

    def _leave_notes(self) -> None:
        if self._placed:
            self.stage(PLACED, 0, [self._placed.encoded()])
