"""What ranks placed in a file that they share: noted by each, put together by the coordinator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    try:  # four bytes of ones are their own crc32c
        return json.loads(line), np.frombuffer(body, "<i8").reshape(-1, 1 + columns)
    except ValueError as error:
        raise CorruptionError("What a rank noted is not what it wrote.") from error


@dataclass(frozen=True, slots=True)
class Shared:
    """What all ranks placed in shared objects: rank, place in the index, offset and size."""

    _rows: NDArray[np.int64]
    _found: Mapping[str, slice]

    @classmethod
    def of(cls, notes: Iterable[bytes], not_visible: Callable[[int], SaveError]) -> Shared:
        """Put together what each rank noted; nothing from one that placed nothing.

        Parameters
        ----------
        notes
            Of each rank.
        not_visible
            Makes the error of a rank whose notes are not what it wrote.
        """
        numbers: dict[str, int] = {}
        tables = [np.empty((0, 5), np.int64)]
        for rank, staged in enumerate(notes):
            if not staged:
                continue
            try:
                paths, rows = decode(staged, 3)
            except CorruptionError as error:
                raise not_visible(rank) from error
            of_paths = np.array([numbers.setdefault(p, len(numbers)) for p in paths], np.int64)
            ranks = np.full(len(rows), rank)
            tables.append(np.column_stack([of_paths[rows[:, 0]], ranks, rows[:, 1:]]))
        table = np.concatenate(tables)
        table = table[np.argsort(table[:, 0], kind="stable")]
        ends = np.cumsum(np.bincount(table[:, 0], minlength=len(numbers))).tolist()
        spans = map(slice, [0, *ends], ends)
        return cls(table[:, 1:], dict(zip(numbers, spans, strict=False)))

    def rows(self, path: str) -> NDArray[np.int64]:
        """Return what was placed of one array."""
        return self._rows[self._found.get(path, slice(0))]


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
