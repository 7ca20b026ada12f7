"""Cut read chunks: each rank stages its pieces, and the coordinator puts them together.

A rank's staging file ``pieces`` holds, for each of its write items in order, the item's pieces in C
order of their read chunks, each followed by its crc32c. The file ``objects`` holds its objects as
records. Both sides compute the same offsets from the layout, so nothing about them is sent. Staging
files are no part of a checkpoint: the commit removes them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.errors import SaveError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Sink, Target
    from dcp_zarr.layout import Assignment
    from dcp_zarr.region import Region, Shape

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
    ranks: Iterable[Sequence[Assignment]],
) -> dict[str, dict[Shape, list[StagedPiece]]]:
    """Return for each FQN, and each of its cut read chunks, the pieces that make it up.

    Parameters
    ----------
    ranks
        For each rank, what its write items come to, in the order in which they were written.
    """
    found: dict[str, dict[Shape, list[StagedPiece]]] = {}
    for rank, assignments in enumerate(ranks):
        offset = 0
        for assignment in assignments:
            if not assignment.pieces_nbytes:
                continue
            of_tensor = found.setdefault(assignment.array.fqn, {})
            for piece in assignment.pieces():
                staged = StagedPiece(rank, offset, piece.region)
                of_tensor.setdefault(piece.read_chunk, []).append(staged)
                offset += piece.region.volume * assignment.array.itemsize + CHECKSUM_BYTES
    return found


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
        self._sink.stage(_OBJECTS, self._offset, [record, stored])
        self._offset += len(record) + len(stored)


def staged_objects(target: Target, rank: int) -> Iterator[StagedObject]:
    """Iterate over a rank's objects. Coordinator only."""
    offset = 0
    while record := target.read_staged(rank, _OBJECTS, offset, _RECORD.size):
        if len(record) < _RECORD.size:
            raise SaveError(f"Rank {rank}'s staged objects end in the middle.", rank=rank)
        item, kind, nbytes, crc = _RECORD.unpack(record)
        offset += _RECORD.size
        size = 0 if kind == ARRAY else nbytes
        content = target.read_staged(rank, _OBJECTS, offset, size)
        check_staged(content, crc, rank, target)
        offset += size
        yield StagedObject(item, kind, nbytes, content)
