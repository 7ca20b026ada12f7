"""How the values of a tensor are distributed: counted in bins, streamed, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isinf
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.dtypes import dtype_of
from dcp_zarr.pictures.histogram import histogram as draw
from dcp_zarr.tasks import check_count
from dcp_zarr.tensor_statistics import boxes, read_bits, statistics, summed
from dcp_zarr.value_sums import BLOCK_ELEMENTS, floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.pictures.picture import Picture
    from dcp_zarr.region import Region
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits
    from dcp_zarr.tensor_statistics import TensorStatistics

_BARS = " ▁▂▃▄▅▆▇█"
_MOST_BINS = 1 << 16
_EDGES_OF_ONE = 2
_SMALL_BYTES = 2
"""Of items so small, each pattern of bits is counted."""
_BINCOUNT_ELEMENTS = 1 << 19
"""Counted at once: numpy makes integers of 8 bytes of them."""


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

    def picture(self, *, is_log: bool = False) -> Picture:
        """Draw the bins.

        Parameters
        ----------
        is_log
            Whether equal steps upwards are equal factors.
        """
        bad = {"NaN": self.nans, "infinite": self.infs}
        note = ", ".join(f"{number:,} {word}" for word, number in bad.items() if number)
        return draw(self.edges, self.counts, self.fqn, note=note, is_log=is_log)

    def _repr_html_(self) -> str:
        """Draw the bins in a notebook."""
        return self.picture().svg


def histogram(
    entry: TensorEntry,
    source: Source,
    bins: int,
    limits: Limits,
    known: TensorStatistics | None = None,
) -> Histogram:
    """Read a tensor, and count its values in bins.

    It is read twice where its items are of more than two bytes and its statistics are not known.

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
    known
        Its statistics; by default those that are stored.

    Raises
    ------
    OptionError
        If `bins` is no whole number from 1 to 65,536.
    CorruptionError
        If stored bytes are lost or changed.
    """
    check_count("bins", bins, most=_MOST_BINS)
    if entry.dtype.itemsize <= _SMALL_BYTES:
        values, times = _distinct(entry, source, limits)
        nans, infs = (int(times[of(values)].sum()) for of in (np.isnan, np.isinf))
        finite, ends = int(times.sum()) - nans - infs, values[np.isfinite(values)]
        tally = partial(_tally, values, times)
    else:
        known = known or next(statistics([entry], source, limits))
        nans, infs = known.nans, known.infs
        finite, ends = known.count - nans - infs, np.array([known.min, known.max])
        tally = partial(_tally_again, entry, source, limits)
    edges = _edges(ends, bins) if finite else np.zeros(0)
    counts = tally(edges) if edges.size > _EDGES_OF_ONE else np.full(edges.size // 2, finite)
    return Histogram(entry.fqn, tuple(edges.tolist()), tuple(counts.tolist()), nans, infs)


@np.errstate(invalid="ignore")
def _distinct(
    entry: TensorEntry, source: Source, limits: Limits
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read a tensor of few bits; return its distinct values, and how often each is there."""
    dtype = dtype_of(entry.dtype.torch_name)

    def count(task: tuple[TensorEntry, Region]) -> NDArray[np.int64]:
        bits = read_bits(entry, source, task[1]).reshape(-1)
        times = np.zeros(1 << 8 * dtype.itemsize, np.int64)
        for at in range(0, bits.size, _BINCOUNT_ELEMENTS):
            times += np.bincount(bits[at : at + _BINCOUNT_ELEMENTS], minlength=times.size)
        return times

    ((_, times),) = summed(((entry, box) for box in boxes(entry)), count, add, limits)
    there = np.flatnonzero(times)
    return dtype.values(there.astype(dtype.bits)).astype(np.float64), times[there]


def _tally_again(
    entry: TensorEntry, source: Source, limits: Limits, edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Read a tensor, and count its values in bins."""

    def count(task: tuple[TensorEntry, Region]) -> NDArray[np.int64]:
        bits = read_bits(entry, source, task[1]).reshape(-1)
        counts = np.zeros(len(edges) - 1, np.int64)
        for at in range(0, bits.size, BLOCK_ELEMENTS):
            counts += _tally(floats(bits[at : at + BLOCK_ELEMENTS], entry.dtype), None, edges)
        return counts

    ((_, counts),) = summed(((entry, box) for box in boxes(entry)), count, add, limits)
    return np.asarray(counts, np.int64)


def _edges(finite: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """Return the edges of equal bins for some values, or of one where these have no width."""
    least, largest = float(finite.min()), float(finite.max())
    half = _half(least, largest)
    edges = np.linspace(half * least, half * largest, bins + 1) / half
    return edges if (np.diff(half * edges) > 0).all() else np.array([least, largest])


@np.errstate(invalid="ignore")
def _tally(
    values: NDArray[Any], times: NDArray[np.int64] | None, edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Count values in bins, each so many times; what is not finite is in none."""
    least, largest = float(edges[0]), float(edges[-1])
    half = _half(least, largest)
    scaled = np.multiply(values, half, dtype=np.float64)
    counts, _ = np.histogram(scaled, len(edges) - 1, (half * least, half * largest), weights=times)
    return counts


def _half(least: float, largest: float) -> float:
    """Return a factor with which float64 holds the width of a range."""
    return 0.5 if isinf(largest - least) else 1.0
