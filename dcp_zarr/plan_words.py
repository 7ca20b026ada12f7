"""DCP's plans of a save in the core's words, in columns: there may be millions of write items."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_zarr import tensors
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import LayoutError, UnsupportedTensorError
from dcp_zarr.metadata_words import DEFAULT_PROPERTIES
from dcp_zarr.parts import Parts, RankParts, by_tensor
from dcp_zarr.placement import SaveOptions, TensorPlan
from dcp_zarr.region import Region, Shape, Tiling

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

    from dcp_zarr.results import RankResult

_Known = dict[tuple[Shape, bytes, bytes], Tiling]

FQN = attrgetter("index.fqn")
_DESCRIBED = attrgetter("tensor_data")
_BOX = attrgetter("chunk")
_OFFSETS = attrgetter("offsets")
_SIZES = attrgetter("sizes")


def item_region(item: WriteItem) -> Region:
    """Return the region of a write item that is no object."""
    assert item.tensor_data is not None  # noqa: S101
    box = item.tensor_data.chunk
    return Region(tuple(box.offsets), tuple(box.sizes))


@dataclass(frozen=True, slots=True)
class Planned:
    """What the plans of all ranks say."""

    tensors: Mapping[str, TensorPlan]
    """By FQN."""
    objects: Sequence[str]
    """FQNs of what is no tensor."""
    parts: Mapping[str, Parts]
    """By FQN of the tensors, in the order of the tilings."""
    fqns: Sequence[Sequence[str]]
    """For each rank, the tensor of each of its parts."""
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
        ranks = [_read(plan) for plan in plans]
        counts = [len(of_rank.boxes) for of_rank in ranks]
        described = _concatenated([of_rank.described for of_rank in ranks])
        boxes = _concatenated([of_rank.boxes for of_rank in ranks])
        parts = by_tensor([of_rank.parts for of_rank in ranks])
        _check_agree(parts, np.concatenate([np.arange(0), *(r.kinds for r in ranks)]), described)
        known: _Known = {}
        planned = {}
        for fqn, of_tensor in parts.items():
            first: TensorWriteData = described[of_tensor.rows[0]]
            tiling = _tiling(known, first.size, of_tensor.offsets, of_tensor.sizes)
            by_dcp = _tiling_of(known, first.size, told[fqn]) if fqn in told else None
            planned[fqn] = _tensor_plan(fqn, first.properties, tiling, by_dcp, options)
        return cls(
            planned,
            [item.index.fqn for plan in plans for item in _objects(plan)],
            parts,
            [of_rank.parts.fqns for of_rank in ranks],
            counts,
            {
                fqn: told.get(fqn, boxes[of_tensor.rows].tolist())
                for fqn, of_tensor in parts.items()
            },
        )

    def confirmed(
        self, metadata: Metadata, results: Sequence[RankResult], options: SaveOptions
    ) -> dict[str, TensorPlan]:
        """Return what the finished `Metadata` says of tensors; mostly the same as the plans.

        Where another writer made the plans, which DCP's cache kept, the ranks tell of shares.
        """
        shared = {fqn for result in results for fqn in result.shared}
        written: Mapping[str, Parts] = {}
        found: dict[str, TensorPlan] = {}
        known: _Known = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if self.boxes.get(fqn) == entry.chunks:  # quick: they are the same objects
                tiling, told = self.tensors[fqn].tiling, self.tensors[fqn].told
            else:
                tiling, told = _tiling_of(known, entry.size, entry.chunks), None
                if fqn in shared:
                    written = written or by_tensor([result.parts for result in results])
                    told = tiling
                    tiling = _tiling(known, entry.size, written[fqn].offsets, written[fqn].sizes)
            found[fqn] = _tensor_plan(fqn, entry.properties, tiling, told, options)
        return found


@dataclass(frozen=True, slots=True)
class RankItems:
    """What a rank's write items say of tensors.

    Each rank reads its own, and sends this along, for the coordinator would take long over all.
    """

    described: Sequence[TensorWriteData]
    """DCP's own words for each part."""
    boxes: Sequence[ChunkStorageMetadata]
    """DCP's own words for each region."""
    kinds: NDArray[np.int64]
    """For each part a number that differs where its tensor's shape or dtype does."""
    parts: RankParts
    """The parts."""

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> RankItems:
        """Read the items of one rank."""
        described = [*map(_DESCRIBED, items)]
        if not all(described):  # objects have none
            items = [item for item in items if item.tensor_data is not None]
            described = [*map(_DESCRIBED, items)]
        boxes = [*map(_BOX, described)]
        kinds = np.array([_kind(d.size, d.properties.dtype) for d in described], np.int64)
        fqns, offsets, sizes = map(FQN, items), map(_OFFSETS, boxes), map(_SIZES, boxes)
        return cls(described, boxes, kinds, RankParts.of([*fqns], offsets, [*sizes]))

    def only(self, described: Sequence[TensorWriteData | None]) -> RankItems | None:
        """Return what is said of some of the items, in their order; None if it is of others."""
        if len(described) == len(self.described) and all(map(is_, described, self.described)):
            return self
        wanted = [*map(id, filter(None, described))]
        kept = np.isin([*map(id, self.described)], wanted)
        found = [*compress(self.described, kept)]
        if [*map(id, found)] != wanted:
            return None
        columns = np.repeat(kept, self.parts.axes)
        parts = RankParts(
            [*compress(self.parts.fqns, kept)],
            self.parts.axes[kept],
            self.parts.offsets[columns],
            self.parts.sizes[columns],
        )
        return RankItems(found, [*compress(self.boxes, kept)], self.kinds[kept], parts)


@lru_cache(maxsize=4096)
def _kind(size: torch.Size, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{tuple(size)} {dtype}".encode())


def _read(plan: SavePlan) -> RankItems:
    """Return what a rank read of its own items, where they are still the same."""
    own = getattr(plan.storage_data, "read", None)
    found = None if own is None else own.only([*map(_DESCRIBED, plan.items)])
    return RankItems.of(plan.items) if found is None else found


def _objects(plan: SavePlan) -> Iterator[WriteItem]:
    described = map(_DESCRIBED, plan.items)
    return (item for item, told in zip(plan.items, described, strict=True) if told is None)


def _concatenated(lists: Sequence[Sequence[Any]]) -> NDArray[np.object_]:
    return np.fromiter(chain.from_iterable(lists), object, sum(map(len, lists)))


def _check_agree(
    parts: Mapping[str, Parts], kinds: NDArray[np.int64], described: NDArray[np.object_]
) -> None:
    """Raise where ranks disagree on what a tensor is."""
    for fqn, of_tensor in parts.items():
        rows = of_tensor.rows
        if len(rows) == 1 or (kinds[rows] == kinds[rows[0]]).all():
            continue
        number = int((kinds[rows] != kinds[rows[0]]).argmax())
        found, other = described[rows[number]], described[rows[0]]
        rank = int(of_tensor.ranks[number])
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
    offsets, sizes = map(_OFFSETS, boxes), [*map(_SIZES, boxes)]
    ((_, parts),) = by_tensor([RankParts.of([""] * len(boxes), offsets, sizes)]).items()
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
