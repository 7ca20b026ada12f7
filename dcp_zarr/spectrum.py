"""The singular values of a tensor: from its Gram matrix, which is added up part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import frexp, ldexp, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.errors import OptionError
from dcp_zarr.region import Grid, Region, coordinates
from dcp_zarr.tensor_statistics import read_box, statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits

_MOST_SINGULAR_VALUES = 8192
_PANEL_BYTES = 64 << 20
"""Bytes that are read at once, at least; of a large Gram matrix as many as that has."""
_SLICE_BYTES = 16 << 20
"""Bytes of float64 (or complex128) that are multiplied at once."""


@dataclass(frozen=True, slots=True, repr=False)
class Spectrum:
    """The singular values of a tensor as a matrix: its first axis against all others.

    They are square roots of the eigenvalues of the Gram matrix of the smaller side, in float64.
    That squares what is small: a singular value is off by about 1e-16 of the largest one's square
    over itself, so those below 1e-8 of the largest are noise, and may be zero.
    """

    fqn: str
    """Fully qualified name."""
    singular_values: tuple[float, ...]
    """As many as the smaller side is long, descending."""
    norm: float
    """Frobenius norm: the square root of the sum of the squares of all values."""
    stable_rank: float
    """Square of `norm` over that of the largest singular value; 0 for a matrix of zeros."""

    def __repr__(self) -> str:
        """Describe the spectrum in a line."""
        ends = ""
        if values := self.singular_values:
            ends = f" from {values[0]:.4g} down to {values[-1]:.4g}"
        return (
            f"Spectrum {self.fqn!r}: {len(values)} singular values{ends}, "
            f"norm {self.norm:.4g}, stable rank {self.stable_rank:.4g}"
        )


def spectrum(entry: TensorEntry, source: Source, limits: Limits) -> Spectrum:
    """Read a tensor, and return its singular values.

    Parameters
    ----------
    entry
        The tensor.
    source
        Where it is.
    limits
        Threads. In memory are the Gram matrix some three times, 0.5 GiB each for a side of 8,192,
        and a part of the tensor that is no larger, or of 64 MiB.

    Raises
    ------
    OptionError
        If it has fewer than two axes, a smaller side beyond 8,192, or values that are not finite.
    CorruptionError
        If stored bytes are lost or changed.
    """
    shape, fqn = entry.array.shape, entry.fqn
    if len(shape) < 2:  # noqa: PLR2004
        raise OptionError(
            f"Tensor {fqn!r} of shape {shape} is no matrix: a spectrum needs two axes or more.",
            fqn=fqn,
        )
    side = min(shape[0], prod(shape[1:]))
    if side > _MOST_SINGULAR_VALUES:
        raise OptionError(
            f"Tensor {fqn!r} of shape {shape} has {side} singular values; a spectrum has at most "
            f"{_MOST_SINGULAR_VALUES}. Take that of a slice: numpy.linalg.svd(tensor.numpy(…)).",
            fqn=fqn,
        )
    (known,) = statistics([entry], source, limits)
    if known.nans or known.infs:
        raise OptionError(
            f"Tensor {fqn!r} holds {known.nans} NaN and {known.infs} infinite values: it has no "
            "spectrum. stats() and histogram() leave them out.",
            fqn=fqn,
        )
    if not known.abs_max > 0:
        return Spectrum(fqn, (0.0,) * side, 0.0, 0.0)
    # So that squares neither overflow nor vanish; 2^1000 is enough for the least float64.
    exponent = max(frexp(known.abs_max)[1], -1000)
    gram = _gram(entry, source, exponent, limits)
    values = np.sqrt(np.linalg.eigvalsh(gram)[::-1].clip(0))
    norm = np.sqrt(gram.trace().real)
    with np.errstate(over="ignore"):
        scaled, whole = np.ldexp(values, exponent), np.ldexp(norm, exponent)
    return Spectrum(fqn, tuple(scaled.tolist()), float(whole), float((norm / values[0]) ** 2))


def _gram(entry: TensorEntry, source: Source, exponent: int, limits: Limits) -> NDArray[Any]:
    """Return the Gram matrix of the smaller side, of values over a power of two."""
    rows, columns = entry.array.shape[0], prod(entry.array.shape[1:])
    side = min(rows, columns)
    is_complex = "complex" in entry.dtype.torch_name
    kind = np.complex128 if is_complex else np.float64
    gram: NDArray[Any] = np.zeros((side, side), kind)
    product = np.empty_like(gram)
    step = max(_SLICE_BYTES // (8 * side), side // 4)
    for box in _panels(entry, side, cut_rows=rows > columns):
        panel = read_box(entry, source, box, limits).reshape(box.sizes[0], -1)
        long = panel if rows > columns else panel.T
        for start in range(0, len(long), step):
            part = long[start : start + step].astype(kind) * ldexp(1.0, -exponent)
            np.matmul((part.conj() if is_complex else part).T, part, out=product)
            gram += product
    return gram


def _panels(entry: TensorEntry, side: int, *, cut_rows: bool) -> Iterator[Region]:
    """Cut a tensor into boxes that hold either all of the first axis, or of all others."""
    shape, budget = entry.array.shape, max(_PANEL_BYTES, 8 * side * side)
    cut = (0,) if cut_rows else tuple(reversed(range(1, len(shape))))
    step = [1 if axis in cut else n for axis, n in enumerate(shape)]
    for axis in cut:
        step[axis] = min(max(budget // (prod(step) * entry.array.itemsize), 1), shape[axis])
        if step[axis] < shape[axis]:
            break
    grid = Grid(shape, tuple(step))
    return (grid.box(position) for position in coordinates(Region.whole(grid.counts)))
