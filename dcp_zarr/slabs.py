"""Slabs: how many writers append to one file, without locks or messages.

Each writer owns byte ranges of the file that follow from the plan alone: a first slab, of the size
that its data is expected to take, and behind all first slabs smaller ones, round by round. A writer
fills its slabs in order. What it leaves of them is a hole, which takes no space on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ALIGNMENT = 4096
"""Slabs begin at multiples of it: what no two hosts may write to is a page of their caches."""

_FURTHER = 16
"""A further slab is this fraction of the first: one sixteenth."""


@dataclass(frozen=True, slots=True)
class Slab:
    """The byte ranges of one writer."""

    start: int
    """Where its first slab begins."""
    nbytes: int
    """Size of its first slab; 0 where it writes nothing."""
    further_start: int
    """Where the second begins."""
    further_nbytes: int
    """Size of the second and of each one after it."""
    stride: int
    """Distance from the second to the third, and so on."""
    count: int
    """How many read chunks the writer places."""

    @classmethod
    def of(cls, row: NDArray[np.int64]) -> Slab:
        """Return the slab of one row of `plan_slabs`."""
        return cls(*row.tolist())

    def range(self, number: int) -> tuple[int, int]:
        """Return where the writer's slab of that number begins and ends."""
        if number == 0:
            return self.start, self.start + self.nbytes
        start = self.further_start + (number - 1) * self.stride
        return start, start + self.further_nbytes


def plan_slabs(
    expected: ArrayLike, largest: ArrayLike, counts: ArrayLike, start: int = 0
) -> NDArray[np.int64]:
    """Divide a file among its writers, of which there may be millions.

    Parameters
    ----------
    expected
        For each writer, the bytes that it is expected to place.
    largest
        For each writer, the most bytes that one of its read chunks may take.
    counts
        For each writer, how many read chunks it places; 0 for one that needs no slab.
    start
        No slab begins before this byte.

    Returns
    -------
    A row for each writer: the fields of its `Slab`.

    Examples
    --------
    >>> first, second = map(Slab.of, plan_slabs([10_000, 70_000], [4_000, 4_000], [3, 18]))
    >>> first.range(0), second.range(0), first.range(1), second.range(1)
    ((0, 12288), (12288, 86016), (86016, 90112), (90112, 98304))
    """
    counts = np.asarray(counts, np.int64)
    first = np.where(counts > 0, _aligned(np.maximum(expected, largest)), 0)
    further = np.where(counts > 0, _aligned(np.maximum(first // _FURTHER, largest)), 0)
    begin = _aligned(np.array(start))
    starts = begin + np.cumsum(first) - first
    further_starts = begin + first.sum() + np.cumsum(further) - further
    stride = np.full_like(counts, further.sum())
    return np.stack([starts, first, further_starts, further, stride, counts], axis=1)


def _aligned(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SlabCursor:
    """Where in its slabs a writer is."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._number = 0
        self._next, self._end = slab.range(0)

    def take(self, nbytes: int) -> int:
        """Return the offset of the next so many bytes.

        Raises
        ------
        ValueError
            If they are more than a slab holds.
        """
        if self._next + nbytes > self._end:
            if nbytes > self._slab.further_nbytes:
                raise ValueError(f"{nbytes} bytes do not fit in slabs like {self._slab}")
            self._number += 1
            self._next, self._end = self._slab.range(self._number)
        self._next += nbytes
        return self._next - nbytes
