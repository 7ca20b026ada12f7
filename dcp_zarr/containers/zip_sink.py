"""A rank's way into the one file of a zip save: whole entries, in its slabs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr import zarr_format
from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.containers.one_file_sink import OneFileSink
from dcp_zarr.containers.whole_objects import WholeObjects
from dcp_zarr.containers.zip_format import Entry, crc32
from dcp_zarr.errors import CorruptionError
from dcp_zarr.local_files import write_all
from dcp_zarr.slabs import SlabCursor

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.slabs import Slab

ENTRIES = "entries"
"""Name of the staging file that tells what entries a rank wrote."""


class ZipSink(OneFileSink):
    """A rank's way into the file; parameters are those of `OneFileSink`, and the rank's slab."""

    def __init__(self, root: int, name: str, rank: int, slab: Slab, *, sync: bool) -> None:
        super().__init__(root, name, rank, sync=sync)
        self._cursor = SlabCursor(slab)
        self._waiting = WholeObjects()
        self._entries: list[Entry] = []

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab | None = None,
    ) -> None:
        """Write an entry, once all its read chunks are there."""
        content = self._waiting.whole(array, write_chunk, stored)
        if content is not None:
            self.add(zarr_format.object_path(array, write_chunk), content)

    def add(self, name: str, content: Sequence[Buffer]) -> None:
        """Write an entry."""
        nbytes, crc = sum(map(len, content)), crc32(content)
        with self._lock:
            start = self._cursor.take(Entry(name, 0, nbytes, crc).end)
            entry = Entry(name, start, nbytes, crc)
            self._entries.append(entry)
        write_all(self._fd, start, [entry.local_header(), *content])
        self._sync.wrote(nbytes)

    def _leave_notes(self) -> None:
        self.stage(ENTRIES, 0, [encode_entries(self._entries)])


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Return a rank's notes of its entries: JSON and a checksum."""
    content = json.dumps([[e.name, e.start, e.nbytes, e.crc] for e in entries]).encode()
    return content + checksum(content)


def decode_entries(staged: bytes) -> list[Entry]:
    """Return the entries in a rank's notes.

    Raises
    ------
    CorruptionError
        If they are not what the rank wrote.
    """
    content, crc = staged[:-CHECKSUM_BYTES], staged[-CHECKSUM_BYTES:]
    if not staged or checksum(content) != crc:
        raise CorruptionError("The checksum of a rank's notes does not hold.")
    return [Entry(*fields) for fields in json.loads(content)]
