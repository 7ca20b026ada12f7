"""Replicas of a DTensor's region: DCP has one rank write them, we have all that hold one.

Each rank notes the large regions of its DTensors before DCP drops all but one of the replicas. The
coordinator then gives each rank that holds one a share of it. A plain tensor stays with the rank
that DCP chose, unless the user says that those of other ranks are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_zarr.layout_rules import READ_CHUNK_BYTES, divisors
from dcp_zarr.plan_words import RankItems, item_region

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

    from dcp_zarr.region import Region

    Entry = tuple[WriteItem, Region | None]
    """A write item, and the region that it is a share of."""

MIN_SHARE_BYTES = 4 << 20
"""Smaller ones would not be objects of their own."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What travels with a rank's local plan."""

    items: tuple[WriteItem, ...]
    """Those worth sharing, should other ranks hold the same region."""
    count: int
    """Number of all the rank's items."""
    read: RankItems
    """What they say of tensors."""

    @classmethod
    def of(cls, items: Sequence[WriteItem], *, plain: bool) -> Noted:
        """Note what of a rank's items is worth sharing. Called on all ranks.

        Parameters
        ----------
        items
            All of them.
        plain
            Whether plain tensors are, too.
        """
        kinds = {WriteItemType.SHARD, *([WriteItemType.TENSOR] if plain else [])}
        held = (item for item in items if item.type in kinds)
        large = (item for item in held if _nbytes(item) >= 2 * MIN_SHARE_BYTES)
        return cls(tuple(large), len(items), RankItems.of(items))


@dataclass(frozen=True, slots=True)
class SharedOut:
    """The plans of all ranks, in which each has a share of what several hold."""

    plans: Sequence[SavePlan]
    """Regions of shared items are shares; their indexes still say what the rank holds."""
    wholes: Sequence[Mapping[int, Region]]
    """For each rank, by the number of the item, the region that its share is of."""
    told: Mapping[str, Sequence[ChunkStorageMetadata]]
    """By FQN of tensors with shares, the regions that DCP planned."""

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> SharedOut:
        """Share out what several ranks noted. Coordinator only."""
        dropped = _dropped(plans)
        if not dropped:
            return cls(plans, [{}] * len(plans), {})
        entries: list[list[Entry | None]] = [[(i, None) for i in plan.items] for plan in plans]
        loads = [sum(map(_nbytes, plan.items)) for plan in plans]
        shared = set()
        for rank, plan in enumerate(plans):
            for number, item in enumerate(plan.items):
                others = dropped.get(item.index, {})
                shares = _shares(item, 1 + len(others)) if others else []
                if not shares or any(other != item for other in others.values()):
                    continue
                shared.add(item.index.fqn)
                loads[rank] -= _nbytes(item)
                entries[rank][number] = None
                holders = sorted([rank, *others], key=loads.__getitem__)
                for holder, share in zip(holders, shares, strict=False):
                    loads[holder] += _nbytes(share)
                    entries[holder].append((share, item_region(item)))
        final = [[entry for entry in of_rank if entry is not None] for of_rank in entries]
        items = (item for plan in plans for item in plan.items if item.index.fqn in shared)
        told: dict[str, list[ChunkStorageMetadata]] = {}
        for item in items:
            told.setdefault(item.index.fqn, []).append(_tensor_data(item).chunk)
        return cls(
            [
                replace(plan, items=[item for item, _ in of_rank])
                for plan, of_rank in zip(plans, final, strict=True)
            ],
            [
                {number: whole for number, (_, whole) in enumerate(of_rank) if whole is not None}
                for of_rank in final
            ],
            told,
        )


def _dropped(plans: Sequence[SavePlan]) -> dict[MetadataIndex, dict[int, WriteItem]]:
    """Return what ranks noted and DCP dropped from their plans, by index and rank."""
    found: dict[MetadataIndex, dict[int, WriteItem]] = {}
    for rank, plan in enumerate(plans):
        noted = plan.storage_data
        if isinstance(noted, Noted) and noted.count > len(plan.items):
            kept = {item.index for item in plan.items}
            for item in noted.items:
                if item.index not in kept:
                    found.setdefault(item.index, {})[rank] = item
    return found


def _shares(item: WriteItem, holders: int) -> list[WriteItem]:
    """Cut an item along its first axis of some length; nothing where no cut is worth it.

    The shares but the last are equal, and whole read chunks fit them.
    """
    told = _tensor_data(item)
    offsets, sizes = told.chunk.offsets, told.chunk.sizes
    axis = next((axis for axis, length in enumerate(sizes) if length > 1), 0)
    most = min(holders, _nbytes(item) // MIN_SHARE_BYTES)
    if most < 2:  # noqa: PLR2004
        return []
    length = sizes[axis]
    least = -(-length // most)
    fitting = divisors(gcd(length, offsets[axis]))  # read chunks divide the starts of all regions
    step = next((divisor for divisor in fitting if divisor >= least), length)
    if step == length and length == told.size[axis]:  # no other region has to fit
        rows = max(READ_CHUNK_BYTES * length // _nbytes(item), 1)
        step = -(-least // rows) * rows
    shares = []
    for start in range(0, length, step):
        at, of = list(offsets), list(sizes)
        at[axis], of[axis] = offsets[axis] + start, min(step, length - start)
        box = ChunkStorageMetadata(torch.Size(at), torch.Size(of))
        shares.append(replace(item, tensor_data=replace(told, chunk=box)))
    return shares if len(shares) > 1 else []


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # noqa: S101
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    told = item.tensor_data
    return 0 if told is None else prod(told.chunk.sizes) * told.properties.dtype.itemsize
