"""The parts of tensors that ranks write, as columns of numbers: there may be millions of them.

A part is what one write item stores of a tensor: a region. Parts of one tensor keep the order of
the ranks, and of each rank's items, which is the order of regions in its tiling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.region import Shape


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts that one rank writes, in the order of its write items."""

    fqns: Sequence[str]
    """The tensor of each."""
    axes: NDArray[np.int64]
    """Number of axes of each."""
    offsets: NDArray[np.int64]
    """Offsets of all regions, one after the other."""
    sizes: NDArray[np.int64]
    """Sizes of all regions, one after the other."""

    @classmethod
    def of(
        cls,
        fqns: Sequence[str],
        offsets: Iterable[Shape],
        sizes: Sequence[Shape],
    ) -> RankParts:
        """Return parts from one tuple of offsets and one of sizes for each."""
        axes = np.fromiter(map(len, sizes), np.int64, len(fqns))
        return cls(fqns, axes, _flat(offsets), _flat(sizes))


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one tensor; each field has a row for each of them."""

    offsets: NDArray[np.int64]
    """Offsets of the regions, of shape ``(parts, axes)``."""
    sizes: NDArray[np.int64]
    """Sizes of the regions, of shape ``(parts, axes)``."""
    ranks: NDArray[np.int64]
    """Who writes it."""
    rows: NDArray[np.int64]
    """Its place among the parts of all ranks."""


def by_tensor(ranks: Sequence[RankParts]) -> dict[str, Parts]:
    """Return the parts of each tensor, by FQN in the order in which ranks first name them.

    Examples
    --------
    >>> first = RankParts.of(["w", "b"], [(0, 0), (0,)], [(2, 3), (4,)])
    >>> second = RankParts.of(["w"], [(2, 0)], [(1, 3)])
    >>> parts = by_tensor([first, second])
    >>> parts["w"].offsets.tolist(), parts["w"].ranks.tolist(), parts["w"].rows.tolist()
    ([[0, 0], [2, 0]], [0, 1], [0, 2])
    """
    numbers: dict[str, int] = {}
    of_part = np.concatenate([np.arange(0), *_numbered(ranks, numbers)])
    rows = np.argsort(of_part, kind="stable")
    writers = np.repeat(np.arange(len(ranks)), [len(of_rank.fqns) for of_rank in ranks])[rows]
    axes = np.concatenate([np.arange(0), *(of_rank.axes for of_rank in ranks)])
    ends = np.cumsum(axes)
    axes, ends = axes[rows], ends[rows]
    within = np.arange(axes.sum()) - np.repeat(np.cumsum(axes) - axes, axes)
    columns = np.repeat(ends - axes, axes) + within
    offsets = np.concatenate([np.arange(0), *(of_rank.offsets for of_rank in ranks)])[columns]
    sizes = np.concatenate([np.arange(0), *(of_rank.sizes for of_rank in ranks)])[columns]
    stops = np.cumsum(np.bincount(of_part, minlength=len(numbers)))
    column_stops = np.cumsum(axes)[stops - 1]
    found, start, column = {}, 0, 0
    for fqn, stop, column_stop in zip(numbers, stops.tolist(), column_stops.tolist(), strict=True):
        count, rest = divmod(column_stop - column, stop - start)
        if rest:
            raise LayoutError(f"Ranks disagree on the number of axes of tensor {fqn!r}.", fqn=fqn)
        shape = stop - start, count
        of_tensor = slice(column, column_stop)
        found[fqn] = Parts(
            offsets[of_tensor].reshape(shape),
            sizes[of_tensor].reshape(shape),
            writers[start:stop],
            rows[start:stop],
        )
        start, column = stop, column_stop
    return found


def _numbered(ranks: Sequence[RankParts], numbers: dict[str, int]) -> Iterable[NDArray[np.int64]]:
    """Yield for each rank the number of each part's tensor; `numbers` learns of new ones."""
    last: Sequence[str] = ()
    of_last = np.arange(0)
    for of_rank in ranks:
        if of_rank.fqns != last:  # most ranks have parts of the same tensors
            last = of_rank.fqns
            of_last = np.array([numbers.setdefault(fqn, len(numbers)) for fqn in last], np.int64)
        yield of_last


def _flat(tuples: Iterable[Shape]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(tuples), np.int64)
