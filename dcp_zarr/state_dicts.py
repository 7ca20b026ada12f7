"""State dicts of new CPU tensors, nested as they were saved. Knows no files and no ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dcp_zarr import engine, tensors
from dcp_zarr.objects import read_objects
from dcp_zarr.region import Region
from dcp_zarr.schema import ObjectEntry

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import Entry, Keys
    from dcp_zarr.tasks import Limits


def load_entries(
    entries: Iterable[Entry], source: Source, limits: Limits, *, weights_only: bool
) -> dict[str, Any]:
    """Read tensors and objects; return their values by FQN, in order.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    UnsafeObjectError
        If `weights_only`, and unpickling an object could run code.
    """
    values: dict[str, Any] = {}
    jobs, stored = [], []
    for entry in entries:
        if not isinstance(entry, ObjectEntry):
            shape, dtype = entry.array.shape, tensors.torch_dtype(entry.dtype.torch_name)
            values[entry.fqn] = torch.empty(shape, dtype=dtype)
            bits = tensors.bits(values[entry.fqn])
            jobs.append(engine.ReadJob(entry.array, entry.codec, Region.whole(shape), bits))
        elif entry.json:
            values[entry.fqn] = entry.json[0]
        else:
            values[entry.fqn] = None  # keeps its place
            stored.append(entry)
    for held, payload in read_objects(source, stored):
        values[held.fqn] = tensors.object_value(payload, held.fqn, weights_only=weights_only)
    for _ in engine.read(jobs, source, limits):
        pass
    return values


class _Branch(dict[str | int, Any]):
    """A dict or list of the nested state dict; a leaf may be a plain dict or list itself."""

    def grown(self) -> Any:  # noqa: ANN401
        """Return this branch as the dict or list that it was."""
        items = {k: v.grown() if isinstance(v, _Branch) else v for k, v in self.items()}
        if not items or not all(type(key) is int for key in items):
            return items
        return [items.get(number) for number in range(max(map(int, items)) + 1)]


def nested(values: Mapping[str, Any], keys: Mapping[str, Keys]) -> dict[str, Any]:
    """Put values where their keys say: text keys make dicts, integer keys lists.

    Examples
    --------
    >>> nested({"layers.0.w": 1.0, "step": 7}, {"layers.0.w": ("layers", 0, "w")})
    {'layers': [{'w': 1.0}], 'step': 7}
    """
    root = _Branch()
    for fqn, value in values.items():
        *above, last = keys.get(fqn, (fqn,))
        branch = root
        for key in above:
            branch = branch.setdefault(key, _Branch())
        branch[last] = value
    grown: dict[str, Any] = root.grown()
    return grown
