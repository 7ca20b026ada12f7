"""DCP's plans of a save in the core's words, in columns: there may be millions of write items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_zarr import tensors
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import LayoutError, UnsupportedTensorError
from dcp_zarr.metadata_words import DEFAULT_PROPERTIES
from dcp_zarr.parts import Parts, RankParts, by_tensor
from dcp_zarr.placement import SaveOptions, TensorPlan
from dcp_zarr.region import Shape, Tiling

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

_Known = dict[tuple[Shape, bytes, bytes], Tiling]

FQN = attrgetter("index.fqn")
_DESCRIBED = attrgetter("tensor_data")
_SIZE = attrgetter("size")
_DTYPE = attrgetter("properties.dtype")
_BOX = attrgetter("chunk")
_OFFSETS = attrgetter("offsets")
_SIZES = attrgetter("sizes")


@dataclass(frozen=True, slots=True)
class Planned:
    """What the plans of all ranks say."""

    tensors: Mapping[str, TensorPlan]
    """By FQN."""
    objects: Sequence[str]
    """FQNs of what is no tensor."""
    parts: Mapping[str, Parts]
    """By FQN of the tensors, in the order of the tilings."""
    counts: Sequence[int]
    """For each rank, the number of its parts."""
    boxes: Mapping[str, Sequence[ChunkStorageMetadata]]
    """By FQN of the tensors, the regions that DCP planned."""

    @classmethod
    def of(
        cls,
        plans: Sequence[SavePlan],
        told: Mapping[str, Sequence[ChunkStorageMetadata]],
        options: SaveOptions,
    ) -> Planned:
        """Read the plans of all ranks.

        Parameters
        ----------
        plans
            What each rank writes.
        told
            By FQN of tensors that DCP planned otherwise, the regions that it did.
        options
            The save's options.

        Raises
        ------
        LayoutError
            If ranks disagree on what a tensor is.
        UnsupportedTensorError
            If a tensor cannot be saved.
        """
        first: dict[str, TensorWriteData] = {}
        objects: list[str] = []
        ranks: list[RankParts] = []
        boxes: list[list[ChunkStorageMetadata]] = []
        expected: list[list[Any]] = []
        for rank, plan in enumerate(plans):
            fqns, described = _tensor_items(plan.items)
            if not ranks or ranks[-1].fqns != fqns:  # most ranks have parts of the same tensors
                of_first = [*map(first.setdefault, fqns, described)]
                expected = [[*map(tells, of_first)] for tells in (_SIZE, _DTYPE)]
            if [[*map(tells, described)] for tells in (_SIZE, _DTYPE)] != expected:
                _refuse_difference(rank, fqns, described, first)
            boxes.append([*map(_BOX, described)])
            ranks.append(_parts(fqns, boxes[-1]))
            if len(fqns) < len(plan.items):
                objects += [item.index.fqn for item in plan.items if item.tensor_data is None]
        counts = [*map(len, boxes)]
        everything = np.fromiter(chain.from_iterable(boxes), object, sum(counts))
        known: _Known = {}
        parts = by_tensor(ranks)
        return cls(
            {
                fqn: _tensor_plan(
                    fqn,
                    first[fqn].properties,
                    _tiling(known, first[fqn].size, of_tensor.offsets, of_tensor.sizes),
                    _tiling_of(known, first[fqn].size, told[fqn]) if fqn in told else None,
                    options,
                )
                for fqn, of_tensor in parts.items()
            },
            objects,
            parts,
            counts,
            {
                fqn: told.get(fqn, everything[of_tensor.rows].tolist())
                for fqn, of_tensor in parts.items()
            },
        )

    def confirmed(self, metadata: Metadata, options: SaveOptions) -> dict[str, TensorPlan]:
        """Return what the finished `Metadata` says of tensors; mostly the same as the plans."""
        found: dict[str, TensorPlan] = {}
        known: _Known = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if self.boxes.get(fqn) == entry.chunks:  # quick: they are the same objects
                tiling, told = self.tensors[fqn].tiling, self.tensors[fqn].told
            else:
                tiling, told = _tiling_of(known, entry.size, entry.chunks), None
            found[fqn] = _tensor_plan(fqn, entry.properties, tiling, told, options)
        return found


def rank_parts(items: Sequence[WriteItem]) -> RankParts:
    """Return the parts of tensors that a rank's write items are."""
    fqns, described = _tensor_items(items)
    return _parts(fqns, [*map(_BOX, described)])


def _parts(fqns: Sequence[str], boxes: Sequence[ChunkStorageMetadata]) -> RankParts:
    return RankParts.of(fqns, map(_OFFSETS, boxes), [*map(_SIZES, boxes)])


def _tensor_items(items: Sequence[WriteItem]) -> tuple[list[str], list[TensorWriteData]]:
    """Return FQN and description of each item that is no object."""
    described = [*map(_DESCRIBED, items)]
    if not all(described):
        items = [item for item in items if item.tensor_data is not None]
        described = [*map(_DESCRIBED, items)]
    return [*map(FQN, items)], described


def _refuse_difference(
    rank: int,
    fqns: Sequence[str],
    described: Sequence[TensorWriteData],
    first: Mapping[str, TensorWriteData],
) -> None:
    """Raise where ranks disagree on what a tensor is."""
    for fqn, found in zip(fqns, described, strict=True):
        other = first[fqn]
        if (found.size, found.properties.dtype) != (other.size, other.properties.dtype):
            raise LayoutError(
                f"Ranks disagree on tensor {fqn!r}: rank {rank} saves a part of "
                f"{found.properties.dtype} {tuple(found.size)}, another rank one of "
                f"{other.properties.dtype} {tuple(other.size)}.",
                fqn=fqn,
                rank=rank,
            )


def _tiling(
    known: _Known, size: torch.Size, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Tiling:
    """Return a tiling; one value for all tensors that are placed alike."""
    shape = tuple(size)
    key = shape, offsets.tobytes(), sizes.tobytes()
    return known.setdefault(key, Tiling(shape, offsets, sizes))


def _tiling_of(known: _Known, size: torch.Size, boxes: Sequence[ChunkStorageMetadata]) -> Tiling:
    ((_, parts),) = by_tensor([_parts([""] * len(boxes), boxes)]).items()
    return _tiling(known, size, parts.offsets, parts.sizes)


def _tensor_plan(
    fqn: str,
    properties: TensorProperties,
    tiling: Tiling,
    told: Tiling | None,
    options: SaveOptions,
) -> TensorPlan:
    described = {
        "layout": tensors.torch_name(properties.layout),
        "requires_grad": properties.requires_grad,
        "memory_format": tensors.torch_name(properties.memory_format),
        "pin_memory": properties.pin_memory,
    }
    if described["layout"] != "strided":
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} has layout {properties.layout}; use to_dense(), or drop it.",
            fqn=fqn,
        )
    name = tensors.torch_name(properties.dtype)
    dtype = dtype_of(name, encoding=options.dtype_encoding, fqn=fqn)
    changed = {key: v for key, v in described.items() if v != DEFAULT_PROPERTIES[key]}
    return TensorPlan(dtype, tiling, changed, told)
