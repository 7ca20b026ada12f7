"""Has libhdf5 make a file around read chunks that lie there already, or copy them into one.

libhdf5 gives no chunk an address of one's choice. But over a file that keeps no lists of free
space, such as h5py's "file object" driver, it allocates at the end, in the order of the calls. So
read chunks that are written in the order of the addresses where they lie, with what lies between
them as chunks of a data set that is unlinked at last, come to lie exactly there; the bytes
themselves never pass through. Every address is compared with the one that libhdf5 tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from h5py import h5d, h5g, h5p, h5s, h5t

from dcp_zarr.containers import hdf5_format
from dcp_zarr.errors import SaveError

if TYPE_CHECKING:
    from dcp_zarr.codecs import Codec
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.schema import TensorEntry

Placed = tuple[int, int, int, int]
"""A stored read chunk: number of its array, place in its grid in C order, offset, size."""

_GAPS = b"~_gaps"
GAP_BYTES = 64 << 20
"""A gap is jumped in steps of this size."""
_NOTHING = np.zeros(GAP_BYTES, np.uint8)


class SparseFile:
    """An object like a binary file that keeps all but a middle part of what is written.

    Parameters
    ----------
    start, end
        The part of which nothing is kept: where read chunks lie already.
    """

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.head = bytearray()
        """What lies before that part."""
        self.tail = bytearray()
        """What lies behind it."""
        self.size = 0
        """The size that the file is to have."""
        self.passed = 0
        """How many bytes were written into that part."""
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to an offset from the start, from here, or from the end."""
        size = self.end + len(self.tail) if self.tail else len(self.head)
        self._position = offset + (0, self._position, size)[whence]
        return self._position

    def tell(self) -> int:
        """Return the offset."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Read from the offset on."""
        kept, position = self._kept(self._position)
        found = kept[position : position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def write(self, content: memoryview) -> int:
        """Write at the offset."""
        nbytes = len(content)
        if self.start <= self._position < self.end:
            self.passed += nbytes
        else:
            kept, position = self._kept(self._position)
            kept.extend(bytes(max(position + nbytes - len(kept), 0)))
            kept[position : position + nbytes] = content
        self._position += nbytes
        return nbytes

    def _kept(self, position: int) -> tuple[bytearray, int]:
        return (self.head, position) if position < self.end else (self.tail, position - self.end)

    def truncate(self, size: int | None = None) -> int:
        """Note the size that the file is to have."""
        self.size = self._position if size is None else size
        return self.size

    def flush(self) -> None:
        """Do nothing."""


@dataclass
class Build:
    """A new file: its groups and data sets, and what is put in them."""

    file: Any
    """The open file; its identifier in h5py's low-level interface."""
    in_place: bool
    """Whether read chunks are to come to lie where they lie already."""
    _groups: dict[str, Any] = field(default_factory=dict)
    _sets: list[tuple[Any, ArrayLayout, Codec]] = field(default_factory=list)
    _gaps: Any = None
    _gap: int = 0
    _swallow: bool = False

    def add(self, array: ArrayLayout, codec: Codec, kind: Any, text: bytes | None) -> int:  # noqa: ANN401
        """Create an array's data set, with its attribute; return its number.

        In place, its index is made whole at once, so that nothing but read chunks is allocated
        afterwards: by one byte that stands for the first read chunk.
        """
        parent, _, name = array.path.rpartition("/")
        made = hdf5_format.creation(array, codec)
        space = h5s.create_simple(array.shape) if array.shape else h5s.create(h5s.SCALAR)
        created = h5d.create(self._group(parent), name.encode(), kind, space, made)
        if text is not None:
            hdf5_format.set_attribute(created, text)
        if self.in_place and hdf5_format.read_chunk_count(array) > 1:
            created.write_direct_chunk((0,) * len(array.shape), b"\0")
        self._sets.append((created, array, codec))
        return len(self._sets) - 1

    def add_tensor(self, entry: TensorEntry, text: bytes) -> None:
        """Create a tensor's data set, with its description."""
        self.add(entry.array, entry.codec, hdf5_format.stored_type(entry.dtype), text)

    def _group(self, path: str) -> Any:  # noqa: ANN401
        if not path:
            return self.file
        if path not in self._groups:
            parent, _, name = path.rpartition("/")
            self._groups[path] = h5g.create(self._group(parent), name.encode())
        return self._groups[path]

    def add_gaps(self, count: int, *, single_bytes: bool) -> None:
        """Create the data set whose chunks jump what lies between read chunks.

        Parameters
        ----------
        count
            How often `jump` will be called, for steps of `GAP_BYTES` at most.
        single_bytes
            Whether a read chunk or a gap is one byte, which libhdf5 would put where the first
            byte of an index was.
        """
        self._swallow = single_bytes
        if single_bytes:
            count += len(self._sets)
        made = h5p.create(h5p.DATASET_CREATE)
        made.set_fill_time(h5d.FILL_TIME_NEVER)
        made.set_chunk((GAP_BYTES,))
        made.set_deflate(1)  # so that a chunk may have any size
        space = h5s.create_simple((GAP_BYTES * (count + 2),))
        self._gaps = h5d.create(self.file, _GAPS, h5t.STD_U8LE, space, made)
        self._gaps.write_direct_chunk((0,), b"\0")

    def remove_gaps(self) -> None:
        """Unlink that data set; at last, since libhdf5 may use its space again."""
        self._gaps = None
        self.file.unlink(_GAPS)

    def jump(self, nbytes: int) -> None:
        """Allocate so many bytes to nothing."""
        while nbytes > 0:
            self._gap += 1
            step = min(nbytes, GAP_BYTES)
            self._gaps.write_direct_chunk((self._gap * GAP_BYTES,), _NOTHING[:step].data)
            nbytes -= step

    def put(
        self, placed: Sequence[Placed], gaps: Sequence[int], content: Callable[[int, int], Any]
    ) -> None:
        """Write read chunks, in the order given.

        Parameters
        ----------
        placed
            The read chunks.
        gaps
            How many bytes to jump before each.
        content
            Gives the stored bytes at an offset.
        """
        corners = self._corners(placed)
        rows = zip(placed, corners, gaps, strict=True)
        for (number, position, offset, nbytes), corner, gap in rows:
            if gap:
                self.jump(gap)
            made, array, codec = self._sets[number]
            stored = content(offset, nbytes)
            if not array.shape:
                bits = np.frombuffer(stored, np.uint8)
                made.write(h5s.ALL, h5s.ALL, bits, mtype=made.get_type())
                continue
            mask = hdf5_format.filter_mask(array, codec, nbytes)
            made.write_direct_chunk(corner, stored, mask)
            if self._swallow and position == 0 and hdf5_format.read_chunk_count(array) > 1:
                self.jump(1)  # takes the byte that the first made free

    def _corners(self, placed: Sequence[Placed]) -> list[tuple[int, ...]]:
        """Return the first element of each read chunk."""
        corners: list[tuple[int, ...]] = [()] * len(placed)
        if not placed:
            return corners
        rows = np.array([row[:2] for row in placed], np.int64)
        order = np.argsort(rows[:, 0], kind="stable")
        numbers, starts = np.unique(rows[order, 0], return_index=True)
        for number, here in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            _, array, _ = self._sets[number]
            if array.shape:
                axes = np.unravel_index(rows[here, 1], array.read_grid.counts)
                found = np.stack(axes, axis=1) * np.array(array.read_chunk_shape)
                for at, corner in zip(here.tolist(), found.tolist(), strict=True):
                    corners[at] = tuple(corner)
        return corners

    def close(self) -> None:
        """Close the file and all that is open in it."""
        self._gaps = None
        self._sets.clear()
        self._groups.clear()
        self.file.close()

    def lying(self, number: int) -> list[list[int]]:
        """Return offset, size and filter mask of an array's read chunks, by libhdf5's account."""
        made, array, _ = self._sets[number]
        return lying(made, array)


def lying(made: Any, array: ArrayLayout) -> list[list[int]]:  # noqa: ANN401
    """Return offset, size and filter mask of each read chunk of a data set, in C order.

    Raises
    ------
    SaveError
        If one is missing.
    """
    count = hdf5_format.read_chunk_count(array)
    if not array.shape:
        return [[made.get_offset() or 0, array.itemsize, 0]]
    if count == 1 and made.get_num_chunks() == 1:
        (*_, offset, nbytes, mask) = _told(made.get_chunk_info(0))
        return [[offset, nbytes, mask]]
    found: list[tuple[int, ...]] = []
    if count > 1:
        made.chunk_iter(lambda stored: found.append(_told(stored)))
    if len(found) != count:
        raise SaveError(f"{array.path!r} has {len(found)} chunks, expected {count}.")
    if not count:
        return []
    rows = np.array(found, np.int64)
    places = rows[:, : len(array.shape)] // np.array(array.read_chunk_shape)
    order = np.argsort(np.ravel_multi_index(tuple(places.T), array.read_grid.counts))
    in_order: list[list[int]] = rows[order, len(array.shape) :].tolist()
    return in_order


def _told(stored: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return what libhdf5 tells of a read chunk: first element, offset, size and filter mask."""
    return (*stored.chunk_offset, stored.byte_offset, stored.size, stored.filter_mask)
