"""Which number of a tensor a layer map shows."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING

from dcp_zarr.errors import OptionError
from dcp_zarr.pictures.layer_map import Cell, layer_map

if TYPE_CHECKING:
    from dcp_zarr.comparison import TensorDifference
    from dcp_zarr.moments import UpdateSize
    from dcp_zarr.pictures.picture import Picture
    from dcp_zarr.tensor_statistics import TensorStatistics

DRIFT = "drift"
QUANTITIES = {
    "std": "Standard deviation",
    "abs_max": "Largest absolute value",
    "zeros": "Share of zeros",
    "norm": "Norm",
    DRIFT: "Norm of the change over the norm before",
}
"""What a layer map may show."""


def check_quantity(quantity: str, *, compared: bool) -> None:
    """Raise unless a layer map can show a quantity.

    Raises
    ------
    OptionError
        If there is no such quantity, or a checkpoint to compare with is missing or too much.
    """
    if quantity not in QUANTITIES:
        raise OptionError(f"There is no quantity {quantity!r}; there are {', '.join(QUANTITIES)}.")
    if quantity == DRIFT and not compared:
        raise OptionError("Drift is from an older checkpoint: layer_map('drift', older).")
    if quantity != DRIFT and compared:
        raise OptionError(f"{quantity!r} is of one checkpoint; only 'drift' compares with another.")


def of_statistics(found: Iterable[TensorStatistics], quantity: str) -> Picture:
    """Draw one of the statistics of tensors; those that hold NaN or infinity are red."""
    return layer_map([_measured(row, quantity) for row in found], QUANTITIES[quantity])


def _measured(row: TensorStatistics, quantity: str) -> Cell:
    bad = {"NaN": row.nans, "infinite": row.infs}
    notes = [f"{number} {word}" for word, number in bad.items() if number]
    value = float(getattr(row, quantity))
    if quantity == "zeros" and row.count:
        value /= row.count
    known = row.count > 0 and isfinite(value)
    return Cell(row.fqn, value if known else None, ", ".join(notes), is_bad=bool(notes))


def of_differences(found: Iterable[TensorDifference]) -> Picture:
    """Draw how far tensors have moved; those that cannot be compared are grey."""
    return layer_map([_moved(row) for row in found], QUANTITIES[DRIFT])


def _moved(row: TensorDifference) -> Cell:
    if row.relative_norm is None or row.max_abs is None:
        return Cell(row.fqn, None, f"{row.change} {row.now or row.was}")
    if isfinite(row.relative_norm):
        return Cell(row.fqn, row.relative_norm)
    if isfinite(row.max_abs):
        return Cell(row.fqn, None, "all zero before")
    return Cell(row.fqn, None, "NaN or infinite", is_bad=True)


def of_updates(found: Iterable[UpdateSize], where: str) -> Picture:
    """Draw how large Adam's last updates were.

    Raises
    ------
    OptionError
        If there are none.
    """
    cells = [
        Cell(
            row.fqn,
            row.rms if isfinite(row.rms) else None,
            f"{row.not_finite} not finite" if row.not_finite else "",
            is_bad=row.not_finite > 0,
        )
        for row in found
    ]
    if not cells:
        raise OptionError(
            f"{where!r} has no moments of Adam: no pair of tensors 'X.exp_avg' and 'X.exp_avg_sq'."
        )
    return layer_map(cells, "Root mean square of Adam's last update, before the learning rate")
