"""Pretend ranks: a whole DCP save or load of several ranks in one process.

Each rank's part of a tensor is given by its placement; plans are made by DCP's own code, so that
they are what real ranks would make. The steps are called in the order of `dcp.save`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_zarr.region import Region


def even(length: int, parts: int) -> list[tuple[int, int]]:
    """Cut an axis as `torch.chunk`, DTensor and FSDP2 do: (offset, size) for each part."""
    step = -(-length // parts) if length else 0
    starts = [min(k * step, length) for k in range(parts)]
    return [(start, min(step, length - start)) for start in starts]


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Region]:
    """Return the regions of a mesh of ranks, one for each rank in C order."""
    axes = [even(n, p) for n, p in zip(shape, parts, strict=True)]
    return [Region(tuple(o for o, _ in at), tuple(s for _, s in at)) for at in product(*axes)]


@dataclass
class Part:
    """A rank's part of a tensor."""

    whole: torch.Tensor
    region: Region

    @property
    def local(self) -> torch.Tensor:
        return self.whole[self.region.slices()]


def parts(whole: torch.Tensor, counts: tuple[int, ...]) -> list[Part]:
    """Give each rank of a mesh its part."""
    return [Part(whole, region) for region in grid(tuple(whole.shape), counts)]


class SavePlanner(DefaultSavePlanner):
    """Plans a rank's flat state dict of parts, tensors and objects."""

    def __init__(self, state_dict):
        super().__init__()
        self.state_dict = state_dict

    def create_local_plan(self):
        return SavePlan([item for fqn, v in self.state_dict.items() for item in _items(fqn, v)])

    def lookup_object(self, index):
        value = self.state_dict[index.fqn]
        if _are_parts(value):
            return next(p.local for p in value if tuple(p.region.offsets) == tuple(index.offset))
        return value.local if isinstance(value, Part) else value


def _are_parts(value):
    return isinstance(value, list) and all(isinstance(part, Part) for part in value)


def _items(fqn, value):
    if _are_parts(value):
        return [item for part in value for item in _items(fqn, part)]
    if not isinstance(value, (Part, torch.Tensor)):
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    part = value if isinstance(value, Part) else Part(value, Region.whole(tuple(value.shape)))
    kind = WriteItemType.SHARD if isinstance(value, Part) else WriteItemType.TENSOR
    box = ChunkStorageMetadata(torch.Size(part.region.offsets), torch.Size(part.region.sizes))
    described = TensorWriteData(
        box, TensorProperties.create_from_tensor(part.local), part.whole.size()
    )
    return [WriteItem(MetadataIndex(fqn, box.offsets), kind, tensor_data=described)]


def plan(writers, states):
    """Plan a save up to and with `prepare_global_plan`; return planners, plans and Metadata."""
    planners = [SavePlanner(state) for state in states]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    local = [
        w.prepare_local_plan(p.create_local_plan()) for w, p in zip(writers, planners, strict=True)
    ]
    deduped = dedup_save_plans(local)
    plans, metadata = create_default_global_save_plan(deduped)
    flat = {fqn: (fqn,) for fqn in metadata.state_dict_metadata}
    metadata = replace(metadata, planner_data=flat)
    return planners, writers[0].prepare_global_plan(plans), metadata


def save(make_writer, states):
    """Save one state per rank; return the Metadata."""
    writers = [make_writer() for _ in states]
    planners, plans, metadata = plan(writers, states)
    results = [
        writer.write_data(each, planner).wait()
        for writer, each, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(metadata, results)
    return metadata


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, state_dict):
        super().__init__(flatten_state_dict=False)
        self.state_dict = state_dict

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn].local


def load(reader, states):
    """Load one state per rank into the parts' own tensors."""
    for rank, state in enumerate(states):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank)
        items = [
            item
            for fqn, part in state.items()
            for item in create_read_items_for_chunk_list(
                fqn,
                metadata.state_dict_metadata[fqn],
                [
                    ChunkStorageMetadata(
                        torch.Size(part.region.offsets), torch.Size(part.region.sizes)
                    )
                ],
            )
        ]
        (mine,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])
        reader.read_data(mine, _LoadPlanner(state)).wait()
