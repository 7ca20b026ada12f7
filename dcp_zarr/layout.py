"""How one tensor is cut into read chunks and write chunks, and what of them a region is.

Pure values; `layout_rules` chooses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from dcp_zarr.region import Grid, Region, Shape, coordinates

if TYPE_CHECKING:
    from dcp_zarr.slabs import Slab

_OBJECT_READ_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """How one tensor is cut into chunks; shapes are those of the tensor."""

    fqn: str
    """Name of the tensor."""
    path: str
    """Path of its array in the container."""
    shape: Shape
    """Shape of the tensor."""
    itemsize: int
    """Bytes of an element."""
    read_chunk_shape: Shape
    """Smallest box that decodes alone."""
    write_chunk_shape: Shape
    """Box of one stored object; a multiple of `read_chunk_shape` on every axis."""
    trailing: Shape = ()
    """Axes that the array has beyond the tensor's; no chunk cuts them."""

    @property
    def read_grid(self) -> Grid:
        """The grid of read chunks."""
        return Grid(self.shape, self.read_chunk_shape)

    @property
    def write_grid(self) -> Grid:
        """The grid of write chunks."""
        return Grid(self.shape, self.write_chunk_shape)

    @property
    def has_one_object(self) -> bool:
        """Whether all of it is one write chunk."""
        return prod(self.write_grid.counts) == 1

    @property
    def read_chunks_per_write_chunk(self) -> Shape:
        """Number of read chunks in a write chunk on each axis, those beyond the tensor included."""
        both = zip(self.write_chunk_shape, self.read_chunk_shape, strict=True)
        return tuple(w // r for w, r in both)

    @property
    def read_chunk_nbytes(self) -> int:
        """Uncompressed bytes of a read chunk."""
        return prod(self.read_chunk_shape) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of the tensor."""
        return prod(self.shape) * self.itemsize

    def write_chunks_of(self, read_chunks: Region) -> Region:
        """Return the write chunks that some read chunks lie in; both are boxes of coordinates."""
        counts = self.read_chunks_per_write_chunk
        starts = tuple(o // n for o, n in zip(read_chunks.offsets, counts, strict=True))
        ends = tuple(-(-e // n) for e, n in zip(read_chunks.ends, counts, strict=True))
        return Region(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def read_chunks_of(self, write_chunk: Shape) -> Region:
        """Return, in grid coordinates, the read chunks in a write chunk that meet the tensor."""
        return self.read_grid.touched(self.write_grid.box(write_chunk))


@dataclass(frozen=True, slots=True)
class Piece:
    """A region's part of a cut read chunk."""

    read_chunk: Shape
    """Grid coordinates of the read chunk."""
    region: Region
    """The part, in the tensor's index space."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one write item comes to: whole read chunks of an array, and pieces of others."""

    array: ArrayLayout
    """The array that the item's tensor is stored in."""
    region: Region
    """The item's region."""
    slab: Slab | None = None
    """Where its read chunks go in the object that the array's writers share, if they share one."""

    @property
    def read_chunks(self) -> Region:
        """Read chunks that this region holds whole, as a box of grid coordinates."""
        return self.array.read_grid.inside(self.region)

    def pieces(self) -> Iterator[Piece]:
        """Iterate in C order over the region's parts of cut read chunks."""
        grid, inner = self.array.read_grid, self.read_chunks
        for read_chunk in coordinates(grid.touched(self.region)):
            starts_ends = zip(read_chunk, inner.offsets, inner.ends, strict=True)
            if inner.volume and all(start <= c < end for c, start, end in starts_ends):
                continue
            yield Piece(read_chunk, grid.box(read_chunk).intersection(self.region))

    @property
    def pieces_nbytes(self) -> int:
        """Uncompressed bytes of all pieces."""
        if self.region.sizes == self.array.shape:
            return 0
        grid, inner = self.array.read_grid, self.read_chunks
        if not inner.volume:
            return self.region.volume * self.array.itemsize
        last = tuple(e - 1 for e in inner.ends)
        first_box, last_box = grid.box(inner.offsets), grid.box(last)
        whole = prod(e - o for o, e in zip(first_box.offsets, last_box.ends, strict=True))
        return (self.region.volume - whole) * self.array.itemsize


def enclosing(shape: Shape, read_chunk_shape: Shape) -> Shape:
    """Return the write chunk shape that holds a whole tensor, at least one read chunk an axis."""
    pairs = zip(shape, read_chunk_shape, strict=True)
    return tuple(max(-(-n // r), 1) * r for n, r in pairs)


def object_layout(fqn: str, path: str, nbytes: int) -> ArrayLayout:
    """Return the layout of an object that is stored as an array of its bytes."""
    step = max(min(nbytes, _OBJECT_READ_CHUNK_BYTES), 1)
    return ArrayLayout(fqn, path, (nbytes,), 1, (step,), (step,))
