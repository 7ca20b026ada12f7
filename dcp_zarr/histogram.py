"""How the values of a tensor are distributed: counted in bins, streamed, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.tasks import check_count
from dcp_zarr.tensor_statistics import boxes, read_bits, statistics, summed
from dcp_zarr.value_sums import BLOCK_ELEMENTS, floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.region import Region
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits

_BARS = " ▁▂▃▄▅▆▇█"
_MOST_BINS = 1 << 16


@dataclass(frozen=True, slots=True, repr=False)
class Histogram:
    """How many values of a tensor lie in each of some equal bins; complex ones by absolute value.

    The first edge is the least finite value and the last edge the largest. A bin holds its lower
    edge, the last one both. There is one bin where bins would have no width, as of a constant, and
    none where no value is finite.
    """

    fqn: str
    """Fully qualified name."""
    edges: tuple[float, ...]
    """Edges of the bins, ascending: one more than there are bins."""
    counts: tuple[int, ...]
    """Number of values in each bin; together all that are finite."""
    nans: int
    """How many are NaN."""
    infs: int
    """How many are infinite."""

    def __repr__(self) -> str:
        """Draw the bins in one line."""
        most = max(self.counts, default=0)
        bars = "".join(_BARS[-(-8 * count // most)] for count in self.counts)
        where = f" from {self.edges[0]:.4g} to {self.edges[-1]:.4g} |{bars}|" if bars else ""
        return (
            f"Histogram {self.fqn!r}: {sum(self.counts)} finite values{where}, "
            f"{self.nans} NaN, {self.infs} infinite"
        )


def histogram(entry: TensorEntry, source: Source, bins: int, limits: Limits) -> Histogram:
    """Read a tensor, and count its values in bins: twice where its range is not known yet.

    Parameters
    ----------
    entry
        The tensor.
    source
        Where it is.
    bins
        How many.
    limits
        Threads; each has one box of the tensor in memory.

    Raises
    ------
    OptionError
        If `bins` is no whole number from 1 to 65,536.
    CorruptionError
        If stored bytes are lost or changed.
    """
    check_count("bins", bins, most=_MOST_BINS)
    (known,) = statistics([entry], source, limits)
    finite = known.count - known.nans - known.infs
    if not finite:
        return Histogram(entry.fqn, (), (), known.nans, known.infs)
    half = 0.5 if isinf(known.max - known.min) else 1.0
    edges = np.linspace(half * known.min, half * known.max, bins + 1)
    if (np.diff(edges) <= 0).any():
        return Histogram(entry.fqn, (known.min, known.max), (finite,), known.nans, known.infs)
    count = partial(_counts_of, source=source, edges=edges, half=half)
    ((_, counts),) = summed(
        ((entry, box) for box in boxes(entry)), count, partial(np.sum, axis=0), limits
    )
    ends = tuple((edges / half).tolist())
    return Histogram(entry.fqn, ends, tuple(counts.tolist()), known.nans, known.infs)


@np.errstate(invalid="ignore")
def _counts_of(
    task: tuple[TensorEntry, Region], source: Source, edges: NDArray[np.float64], half: float
) -> NDArray[np.int64]:
    """Count the values in a box; what is not finite is in no bin."""
    entry, box = task
    bits = read_bits(entry, source, box).reshape(-1)
    counts: NDArray[Any] = np.zeros(edges.size - 1, np.int64)
    within = edges[0], edges[-1]
    for start in range(0, bits.size, BLOCK_ELEMENTS):
        values = floats(bits[start : start + BLOCK_ELEMENTS], entry.dtype)
        scaled = np.multiply(values, half, dtype=np.float64)
        counts += np.histogram(scaled, counts.size, within)[0]
    return counts
