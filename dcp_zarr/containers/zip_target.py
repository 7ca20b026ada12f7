"""Saving into one zip file on a local or shared file system.

All ranks write whole entries at once, each in its own slabs. What makes a zip file of them, the
central directory, the coordinator writes last. Bytes between entries are legal; no reader of zip
files looks at them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import zarr_format
from dcp_zarr.containers.gaps import close_gaps
from dcp_zarr.containers.one_file_target import FILE, OneFileTarget
from dcp_zarr.containers.zip_format import Entry, central_directory
from dcp_zarr.containers.zip_sink import ENTRIES, ZipSink, decode_entries
from dcp_zarr.containers.zip_source import root_document
from dcp_zarr.errors import CorruptionError, DcpZarrError, SaveError
from dcp_zarr.local_files import sync_file, write_all
from dcp_zarr.region import Region, coordinates

if TYPE_CHECKING:
    from pathlib import Path

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema, TensorEntry
    from dcp_zarr.slabs import Slab


class ZipTarget(OneFileTarget):
    """A zip file to be."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, sync: bool) -> None:
        super().__init__(path, overwrite=overwrite, sync=sync)
        self._entries: dict[int, dict[str, Entry]] = {}

    _kind = "a zip file"

    def _replaceable(self, path: Path) -> bool:
        if not path.is_file():
            return False
        try:
            return not path.stat().st_size or zarr_format.is_checkpoint(root_document(path))
        except (DcpZarrError, FileNotFoundError):
            return False

    def _front_nbytes(self, tensors: Iterable[TensorEntry]) -> int:
        """Return 0: entries begin at once."""
        return 0

    def _sink(self, root: int, rank: int, slab: Slab, *, sync: bool) -> ZipSink:
        return ZipSink(root, FILE, rank, slab, sync=sync)

    def _end(self, ranks: int) -> int:
        ends = [e.end for rank in range(ranks) for e in self._entries_of(rank).values()]
        return max(ends, default=0)

    def _entries_of(self, rank: int) -> dict[str, Entry]:
        """Return a rank's entries by name."""
        if rank not in self._entries:
            notes = self._read_notes(rank, ENTRIES)
            try:
                entries = decode_entries(notes) if notes else []  # a rank without items has none
            except CorruptionError as error:
                raise self._not_visible(rank) from error
            self._entries[rank] = {entry.name: entry for entry in entries}
        return self._entries[rank]

    def check_placed(self, array: ArrayLayout, ranks: Mapping[Shape, int]) -> None:
        """Raise unless a rank's notes tell of all its objects. Coordinator only."""
        for write_chunk, rank in ranks.items():
            if zarr_format.object_path(array, write_chunk) not in self._entries_of(rank):
                raise self._not_visible(rank)

    def commit(self, schema: Schema) -> None:
        """Write the documents and the central directory, and rename. Coordinator only."""
        self._commit.check_unchanged()
        last = max(self._entries, default=-1) + 1
        entries = [e for rank in range(last + 1) for e in self._entries_of(rank).values()]
        _check_entries(entries, schema)
        fd = os.open(self._commit.partial / FILE, os.O_RDWR)
        try:
            entries = _close_gaps(fd, sorted(entries, key=lambda entry: entry.start))
            self._finish(fd, entries, schema)
            if self._sync:
                sync_file(fd)
        finally:
            os.close(fd)
        self._commit.commit_file(FILE, sync=self._sync)

    def _finish(self, fd: int, entries: list[Entry], schema: Schema) -> None:
        """Append the documents, the root last, and the central directory."""
        end = start = entries[-1].end if entries else 0
        buffers: list[bytes] = []
        for name, document in zarr_format.store_documents(schema):
            entries.append(Entry.of(name, end, document))
            buffers += [entries[-1].local_header(), document]
            end = entries[-1].end
        buffers.append(central_directory(entries, end))
        write_all(fd, start, [b"".join(buffers)])
        os.ftruncate(fd, end + len(buffers[-1]))


def _check_entries(entries: Sequence[Entry], schema: Schema) -> None:
    """Raise unless each object of each array is there once, in bytes of its own."""
    expected = {
        zarr_format.object_path(array, write_chunk)
        for array, _, _ in schema.arrays()
        if prod(array.shape)
        for write_chunk in coordinates(Region.whole(array.write_grid.counts))
    }
    found = sorted(entries, key=lambda entry: entry.start)
    placed = {entry.name for entry in entries}
    overlap = any(b.start < a.end for a, b in pairwise(found))
    if overlap or len(placed) < len(entries) or placed != expected:
        names = ", ".join(map(repr, sorted(placed ^ expected)[:3])) or "some overlap"
        raise SaveError(
            f"What the ranks wrote is not each object once ({names}); the save is given up. "
            "Another job may be saving to the same path."
        )


def _close_gaps(fd: int, entries: list[Entry]) -> list[Entry]:
    """Move entries together where the holes between them are many; return where they are."""
    if not entries:
        return entries
    placed = np.array([(entry.start, entry.end - entry.start) for entry in entries], np.uint64)
    starts = close_gaps(fd, placed)[:, 0].tolist()
    return [replace(entry, start=start) for entry, start in zip(entries, starts, strict=True)]
