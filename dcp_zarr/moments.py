"""How large the last updates of Adam were, from its moments: streamed, in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import nan, sqrt
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.tensor_statistics import as_float64, boxes, inner_product, read_blocks, summed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.region import Region
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits

FIRST, SECOND = ".exp_avg", ".exp_avg_sq"
"""How the names of the two moments end in torch."""
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """How large the last update of one parameter was, before the learning rate."""

    fqn: str
    """Name that both moments begin with."""
    rms: float
    """Root mean square of ``exp_avg / (sqrt(exp_avg_sq) + 1e-8)``; NaN where none is finite."""
    not_finite: int
    """How many elements have no finite one."""


@dataclass(frozen=True, slots=True)
class _Sums:
    finite: int = 0
    squares: float = 0.0
    not_finite: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.finite + other.finite,
            self.squares + other.squares,
            self.not_finite + other.not_finite,
        )


def owners(fqns: Collection[str]) -> list[str]:
    """Return the names that have both moments below them.

    Examples
    --------
    >>> owners(["w", "state.w.exp_avg", "state.w.exp_avg_sq", "state.b.exp_avg"])
    ['state.w']
    """
    known = set(fqns)
    return [
        fqn.removesuffix(FIRST)
        for fqn in fqns
        if fqn.endswith(FIRST) and fqn.removesuffix(FIRST) + SECOND in known
    ]


def update_sizes(
    entries: Mapping[str, TensorEntry], source: Source, limits: Limits
) -> Iterator[UpdateSize]:
    """Read Adam's moments, and yield how large each update was, in order.

    Parameters
    ----------
    entries
        The tensors by FQN; those that are no moments are left alone.
    source
        Where they are.
    limits
        Threads; each has one box of two tensors in memory.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    pairs = [(entries[owner + FIRST], entries[owner + SECOND]) for owner in owners(entries)]
    alike = [(a, b) for a, b in pairs if a.array.shape == b.array.shape]
    tasks = ((pair, box) for pair in alike for box in boxes(pair[0]))
    for (first, _), sums in summed(tasks, partial(_sums_of, source=source), add, limits):
        rms = sqrt(sums.squares / sums.finite) if sums.finite else nan
        yield UpdateSize(first.fqn.removesuffix(FIRST), rms, sums.not_finite)


def _sums_of(task: tuple[tuple[TensorEntry, TensorEntry], Region], source: Source) -> _Sums:
    pair, box = task
    blocks = read_blocks(((entry, source) for entry in pair), box)
    return reduce(add, (_sums_of_block(first, second) for first, second in blocks), _Sums())


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _sums_of_block(first: NDArray[Any], second: NDArray[Any]) -> _Sums:
    updates = as_float64(first) / (np.sqrt(as_float64(second)) + _EPSILON)
    finite = updates[np.isfinite(updates)]
    return _Sums(finite.size, inner_product(finite, finite), updates.size - finite.size)
