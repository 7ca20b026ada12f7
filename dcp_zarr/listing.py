"""How a checkpoint is listed: a line above, and a row for each entry. Nothing is read."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from dcp_zarr import display
from dcp_zarr.lazy_tensor import LazyTensor
from dcp_zarr.objects import object_row
from dcp_zarr.schema import ObjectEntry

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import Schema


def rows(schema: Schema, source: Source) -> list[display.Row]:
    """Return what is shown of each entry, in the order of the state dict."""
    return [
        object_row(entry) if isinstance(entry, ObjectEntry) else LazyTensor(entry, source).row()
        for entry in schema.entries
    ]


def title(schema: Schema, where: str) -> str:
    """Return how many tensors there are, and how large they are."""
    entries = schema.tensors.values()
    elements = sum(prod(entry.array.shape) for entry in entries)
    nbytes = sum(entry.array.nbytes for entry in entries)
    stored = sum(entry.stored_nbytes for entry in entries)
    plural = "" if len(entries) == 1 else "s"
    return (
        f"Checkpoint {where}: {len(entries)} tensor{plural}, {display.count(elements)} elements, "
        f"{display.size(nbytes)} ({display.size(stored)} stored)"
    )
