"""What ranks placed in a file that they share: noted by each, put together by the coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.errors import CorruptionError, SaveError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout

PLACED = "placed"
"""Name of the staging file."""


class Placed:
    """A rank's notes: path of the array and some numbers for each read chunk.

    The numbers are its place in the array's index, in C order, offset and size; and, where that
    does not stand with it, its checksum.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._rows: list[tuple[int, ...]] = []

    def __bool__(self) -> bool:
        """Say whether anything was noted."""
        return bool(self._rows)

    def add(self, path: str, read_chunks: Iterable[tuple[int, ...]]) -> None:
        """Note read chunks of an array."""
        number = self._numbers.setdefault(path, len(self._numbers))
        self._rows += [(number, *read_chunk) for read_chunk in read_chunks]

    def encoded(self) -> bytes:
        """Return the staging file: paths as a line of JSON, rows of numbers, a checksum."""
        content = json.dumps([*self._numbers]).encode() + b"\n"
        content += np.array(self._rows, "<i8").tobytes()
        return content + checksum(content)


def decode(staged: bytes, columns: int) -> tuple[list[str], NDArray[np.int64]]:
    """Return what a rank noted: paths, and rows that begin with the number of one of them.

    Raises
    ------
    CorruptionError
        If it is not what the rank wrote.
    """
    content, crc = staged[:-CHECKSUM_BYTES], staged[-CHECKSUM_BYTES:]
    if checksum(content) != crc:
        raise CorruptionError("The checksum of what a rank noted does not hold.")
    line, _, body = content.partition(b"\n")
    return json.loads(line), np.frombuffer(body, "<i8").reshape(-1, 1 + columns)


def by_path(staged: bytes) -> Mapping[str, NDArray[np.int64]]:
    """Return what a rank noted, by path: rows of place in the index, offset and size.

    Raises
    ------
    CorruptionError
        If it is not what the rank wrote.
    """
    paths, rows = decode(staged, 3)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    starts = np.searchsorted(rows[:, 0], np.arange(1, len(paths)))
    return {p: of_path[:, 1:] for p, of_path in zip(paths, np.split(rows, starts), strict=True)}


def extents(array: ArrayLayout, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the index of an object from all that was placed in it.

    Raises
    ------
    SaveError
        If a read chunk is missing, was placed twice, or shares a byte with another.
    """
    count = prod(array.read_chunks_per_write_chunk)
    found = rows[np.argsort(rows[:, 1])]
    overlap = (found[1:, 1] < found[:-1, 1:].sum(axis=1)).any()
    if overlap or not np.array_equal(np.sort(rows[:, 0]), np.arange(count)):
        raise SaveError(
            f"What the ranks placed of tensor {array.fqn!r} is not each read chunk once; the save "
            "is given up. Another job may be saving to the same path.",
            fqn=array.fqn,
        )
    return rows[np.argsort(rows[:, 0]), 1:].astype(np.uint64)
