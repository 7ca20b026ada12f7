"""What the tensors of a checkpoint come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_zarr.schema import TensorEntry


@dataclass(frozen=True, slots=True)
class Total:
    """What the tensors of one dtype, below one first segment of a name, come to."""

    part: str
    """The segment."""
    dtype: str
    """Torch dtype, without ``torch.``."""
    tensors: int
    """How many."""
    elements: int
    """Their elements."""
    nbytes: int
    """Their bytes, uncompressed."""
    stored_nbytes: int
    """Their bytes as stored."""


def totals(entries: Iterable[TensorEntry]) -> Iterator[Total]:
    """Yield tensors, elements and bytes for each first segment of a name, and dtype."""
    found: dict[tuple[str, str], list[TensorEntry]] = {}
    for entry in entries:
        found.setdefault((entry.fqn.split(".")[0], entry.dtype.torch_name), []).append(entry)
    for (part, dtype), together in found.items():
        yield Total(
            part,
            dtype,
            len(together),
            sum(prod(entry.array.shape) for entry in together),
            sum(entry.array.nbytes for entry in together),
            sum(entry.stored_nbytes for entry in together),
        )
