"""Cut read chunks: each rank stages its pieces, and the coordinator puts them together.

A rank's staging file ``pieces`` holds, for each of its write items in order, the item's pieces in C
order of their read chunks, each followed by its crc32c. The file ``objects`` holds its objects as
records. Both sides compute the same offsets from the layout, so nothing about them is sent. Staging
files are no part of a checkpoint: the commit removes them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.errors import SaveError
from dcp_zarr.layout import Assignment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Sink, Target
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.parts import Parts
    from dcp_zarr.region import Region, Shape, Tiling

_PIECES = "pieces"
_OBJECTS = "objects"
_RECORD = struct.Struct("<IBQ4s")

JSON = 1
PAYLOAD = 2
ARRAY = 3


def staged_nbytes(assignment: Assignment) -> int:
    """Return what the pieces of one write item take in the staging file, checksums included."""
    touched = assignment.array.read_grid.touched(assignment.region).volume
    count = touched - assignment.read_chunks.volume
    return assignment.pieces_nbytes + CHECKSUM_BYTES * count


def stage_pieces(
    sink: Sink, offset: int, assignment: Assignment, values: Callable[[Region], NDArray[Any]]
) -> None:
    """Write the pieces of one write item into its rank's staging file.

    Parameters
    ----------
    sink
        The rank's sink.
    offset
        Where in the staging file this item begins.
    assignment
        The item's region and layout.
    values
        Gives the bits in a region of the tensor.
    """
    for piece in assignment.pieces():
        staged = np.ascontiguousarray(values(piece.region)).tobytes()
        sink.stage(_PIECES, offset, [staged, checksum(staged)])
        offset += len(staged) + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Where a piece of a read chunk was staged."""

    rank: int
    offset: int
    region: Region


def find_pieces(
    layouts: Mapping[str, ArrayLayout],
    tilings: Mapping[str, Tiling],
    parts: Mapping[str, Parts],
    counts: Sequence[int],
) -> Iterator[tuple[str, dict[Shape, list[StagedPiece]]]]:
    """Yield each tensor that is cut, and for each of its cut read chunks the pieces.

    Parameters
    ----------
    layouts, tilings
        By FQN.
    parts
        By FQN, in the order of the tilings.
    counts
        For each rank, the number of its parts.
    """
    nbytes = np.zeros(sum(counts), np.int64)
    cut = []
    for fqn, tiling in tilings.items():
        if not tiling.is_whole:
            column = _staged_column(layouts[fqn], tiling)
            if column.any():
                cut.append(fqn)
                nbytes[parts[fqn].rows] = column
    offsets = np.cumsum(nbytes) - nbytes
    begins = np.cumsum(counts) - counts
    offsets -= np.repeat(np.append(offsets, 0)[begins], counts)
    for fqn in cut:
        array, of_tensor = layouts[fqn], parts[fqn]
        found: dict[Shape, list[StagedPiece]] = {}
        columns = of_tensor.ranks.tolist(), offsets[of_tensor.rows].tolist()
        each = zip(*columns, tilings[fqn], strict=True)
        if prod(array.read_grid.counts) == 1:  # then a region is a piece
            read_chunk = (0,) * len(array.shape)
            found[read_chunk] = [StagedPiece(*part) for part in each if part[2].volume]
        else:
            for rank, offset, region in each:
                for piece in Assignment(array, region).pieces():
                    staged = StagedPiece(rank, offset, piece.region)
                    found.setdefault(piece.read_chunk, []).append(staged)
                    offset += piece.region.volume * array.itemsize + CHECKSUM_BYTES
        yield fqn, found


def _staged_column(array: ArrayLayout, tiling: Tiling) -> NDArray[np.int64]:
    """Return `staged_nbytes` for each region of a tensor."""
    grid = array.read_grid
    shape, step = np.array(grid.shape, np.int64), np.array(grid.step, np.int64)
    starts, inside = grid.insides(tiling)
    whole = np.minimum((starts + inside) * step, shape) - starts * step
    whole = np.where(inside > 0, whole, 0).prod(axis=1)
    volumes = tiling.sizes.prod(axis=1)
    touched = (-(-tiling.ends // step) - tiling.offsets // step).prod(axis=1)
    count = np.where(volumes > 0, touched, 0) - inside.prod(axis=1)
    staged: NDArray[np.int64] = (volumes - whole) * array.itemsize + CHECKSUM_BYTES * count
    return staged


def assemble(
    target: Target, pieces: Sequence[StagedPiece], dtype: np.dtype[Any], box: Region
) -> NDArray[Any]:
    """Put a cut read chunk together from its pieces. Coordinator only.

    Parameters
    ----------
    target
        Where the ranks staged them.
    pieces
        Of this read chunk, from all ranks.
    dtype
        Dtype of the bits.
    box
        The read chunk, clipped to the tensor.

    Raises
    ------
    SaveError
        If a piece is not there as its rank wrote it.
    """
    whole = np.zeros(box.sizes, dtype)
    if sum(piece.region.volume for piece in pieces) != box.volume:
        raise SaveError(f"Read chunk {box} was not staged whole; the save is given up.")
    for piece in pieces:
        nbytes = piece.region.volume * dtype.itemsize
        staged = target.read_staged(piece.rank, _PIECES, piece.offset, nbytes + CHECKSUM_BYTES)
        check_staged(staged[:nbytes], staged[nbytes:], piece.rank, target)
        part = np.frombuffer(staged, dtype, count=piece.region.volume)
        whole[piece.region.slices(box.offsets)] = part.reshape(piece.region.sizes)
    return whole


def check_staged(staged: bytes, crc: bytes, rank: int, target: Target) -> None:
    """Raise unless what a rank staged has its checksum. Coordinator only.

    Raises
    ------
    SaveError
        With the rank.
    """
    if checksum(staged) != crc:
        raise SaveError(
            f"What rank {rank} staged for {target.where!r} is not what the coordinator reads back: "
            "is the path shared, and its file system sound?",
            rank=rank,
            path=target.where,
        )


@dataclass(frozen=True, slots=True)
class StagedObject:
    """An object as its rank left it."""

    item: int
    """Which of the rank's write items it is."""
    kind: int
    """`JSON` or `PAYLOAD`; or `ARRAY` where the rank stored it in an array of its own."""
    nbytes: int
    """Size of the object's bytes."""
    content: bytes
    """JSON text, or the bytes that `torch.save` wrote; empty for `ARRAY`."""


class ObjectStager:
    """Appends a rank's objects to its staging file."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._offset = 0

    def add(self, item: int, kind: int, content: bytes | memoryview, nbytes: int) -> None:
        """Append one object."""
        stored = b"" if kind == ARRAY else content
        record = _RECORD.pack(item, kind, nbytes, checksum(stored))
        record += checksum(record)
        self._sink.stage(_OBJECTS, self._offset, [record, stored])
        self._offset += len(record) + len(stored)


def staged_objects(target: Target, rank: int) -> Iterator[StagedObject]:
    """Iterate over a rank's objects. Coordinator only."""
    offset = 0
    while record := target.read_staged(rank, _OBJECTS, offset, _RECORD.size + CHECKSUM_BYTES):
        if len(record) < _RECORD.size + CHECKSUM_BYTES:
            raise SaveError(f"Rank {rank}'s staged objects end in the middle.", rank=rank)
        check_staged(record[: _RECORD.size], record[_RECORD.size :], rank, target)
        item, kind, nbytes, crc = _RECORD.unpack_from(record)
        offset += len(record)
        size = 0 if kind == ARRAY else nbytes
        content = target.read_staged(rank, _OBJECTS, offset, size)
        check_staged(content, crc, rank, target)
        offset += size
        yield StagedObject(item, kind, nbytes, content)
