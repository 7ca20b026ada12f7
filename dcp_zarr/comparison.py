"""What differs between two checkpoints: streamed, in bounded memory, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import nan, sqrt
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.errors import OptionError
from dcp_zarr.tensor_statistics import as_float64, boxes, inner_product, read_blocks, summed

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.region import Region
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs between two checkpoints, an old one and a new one.

    The numbers are None where the tensor is in one of them only, or its shapes differ; values that
    have the same bits in both do not differ, NaN included.
    """

    fqn: str
    """Fully qualified name; where they are compared by another, that in the new one."""
    change: str
    """``equal``, ``values``, ``dtype``, ``shape``, ``added`` or ``removed``."""
    was: str
    """Dtype and shape in the old one."""
    now: str
    """Dtype and shape in the new one."""
    differing: int | None = None
    """How many elements differ."""
    max_abs: float | None = None
    """The largest absolute difference."""
    relative_norm: float | None = None
    """Norm of the difference over the norm of the old one."""
    cosine: float | None = None
    """Cosine of the angle between the two."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """What is known of a part of two tensors."""

    differing: int = 0
    max_abs: float = 0.0
    apart: float = 0.0
    old: float = 0.0
    new: float = 0.0
    product: float = 0.0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.differing + other.differing,
            float(np.maximum(self.max_abs, other.max_abs)),  # NaN stays
            self.apart + other.apart,
            self.old + other.old,
            self.new + other.new,
            self.product + other.product,
        )


def renamed(entries: object, names: Callable[[str], str]) -> dict[str, TensorEntry]:
    """Return the tensors of a mapping by other names.

    Raises
    ------
    OptionError
        If two would have one name, or it is no mapping, but what was given as a checkpoint.
    """
    if not isinstance(entries, Mapping):
        raise OptionError(
            f"An open checkpoint is compared with, not {entries!r}: pass open_checkpoint(path)."
        )
    found: dict[str, TensorEntry] = {}
    for fqn, entry in entries.items():
        if (other := found.setdefault(names(fqn), entry)) is not entry:
            raise OptionError(
                f"{other.fqn!r} and {fqn!r} would both be compared as {names(fqn)!r}: change names."
            )
    return found


def differences(
    old: Mapping[str, TensorEntry],
    new: Mapping[str, TensorEntry],
    sources: tuple[Source, Source],
    limits: Limits,
) -> Iterator[TensorDifference]:
    """Read the tensors that two checkpoints have in common, and yield how each differs.

    Parameters
    ----------
    old, new
        The tensors by the names that are compared.
    sources
        Where the old ones and the new ones are.
    limits
        Threads; each has one box of two tensors in memory.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    for fqn in {**old, **new}:
        if fqn not in new:
            yield TensorDifference(old[fqn].fqn, "removed", _described(old[fqn]), "")
        elif fqn not in old:
            yield TensorDifference(new[fqn].fqn, "added", "", _described(new[fqn]))
        elif old[fqn].array.shape != new[fqn].array.shape:
            yield TensorDifference(fqn, "shape", _described(old[fqn]), _described(new[fqn]))
    pairs = [
        (old[fqn], new[fqn])
        for fqn in old
        if fqn in new and old[fqn].array.shape == new[fqn].array.shape
    ]
    tasks = ((pair, box) for pair in pairs for box in boxes(pair[1]))
    for pair, sums in summed(tasks, partial(_compare, sources=sources), add, limits):
        yield _finished(*pair, sums)


def _described(entry: TensorEntry) -> str:
    return f"{entry.dtype.torch_name} {list(entry.array.shape)}"


def _compare(
    task: tuple[tuple[TensorEntry, TensorEntry], Region], sources: tuple[Source, Source]
) -> _Sums:
    entries, box = task
    blocks = read_blocks(zip(entries, sources, strict=True), box)
    return reduce(add, (_compare_blocks(old, new) for old, new in blocks), _Sums())


@np.errstate(invalid="ignore", over="ignore")
def _compare_blocks(old: NDArray[Any], new: NDArray[Any]) -> _Sums:
    same = old == new
    if old.dtype == new.dtype:  # NaN is NaN
        same = _bits(old) == _bits(new)
        same = same.reshape(old.size, -1).all(axis=1) if same.size > old.size else same
    first, second = as_float64(old), as_float64(new)
    apart = np.where(same, 0.0, np.abs(_exact(new) - _exact(old)))
    return _Sums(
        int(same.size - np.count_nonzero(same)),
        float(apart.max(initial=0.0)),
        inner_product(apart, apart),
        inner_product(first, first),
        inner_product(second, second),
        inner_product(first, second),
    )


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of values: an integer for each, or two."""
    return values.view(f"u{min(values.itemsize, 8)}")


def _exact(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as those of 64 bits, complex where they are."""
    is_complex = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _finished(old: TensorEntry, new: TensorEntry, sums: _Sums) -> TensorDifference:
    is_equal = sums.differing == 0
    change = "equal" if is_equal else "values"
    if old.dtype.torch_name != new.dtype.torch_name:
        change = "dtype"
    norms = sqrt(sums.old) * sqrt(sums.new)
    return TensorDifference(
        new.fqn,
        change,
        _described(old),
        _described(new),
        sums.differing,
        sums.max_abs,
        sqrt(sums.apart / sums.old) if sums.old else (0.0 if is_equal else nan),
        sums.product / norms if norms else nan,
    )
