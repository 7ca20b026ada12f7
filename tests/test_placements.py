"""Tensors that only some ranks hold, or in pieces of any size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from dcp_zarr import ZarrStorageReader, ZarrStorageWriter
from tests import processes

pytestmark = pytest.mark.dist

WHOLE = torch.arange(300 * 100.0).reshape(300, 100)

# Rank, offsets and sizes: the first rank holds three uneven boxes, the second one two.
BOXES = [
    (0, [0, 0], [7, 100]),
    (1, [7, 0], [293, 13]),
    (0, [7, 13], [200, 87]),
    (0, [207, 13], [93, 1]),
    (1, [207, 14], [93, 86]),
]


def boxed(whole):
    """Return the whole as torch's older kind of distributed tensor, in those boxes."""
    from torch.distributed._shard import sharded_tensor, sharding_spec

    metadata = [
        sharding_spec.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")
        for rank, offsets, sizes in BOXES
    ]
    spec = sharding_spec.EnumerableShardingSpec(metadata)
    tensor = sharded_tensor.empty(spec, whole.shape, dtype=whole.dtype)
    for local in tensor.local_shards():
        local.tensor.copy_(whole[place(local)])
    return tensor


def place(local):
    box = local.metadata
    pairs = zip(box.shard_offsets, box.shard_sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in pairs)


def save_boxes(rank, count):
    writer = ZarrStorageWriter("x.zarr", read_chunk_bytes=5000)
    metadata = dcp.save({"w": boxed(WHOLE)}, storage_writer=writer)
    saved = metadata.state_dict_metadata["w"].chunks
    found = [(list(box.offsets), list(box.sizes)) for box in saved]
    assert sorted(found) == sorted((offsets, sizes) for _, offsets, sizes in BOXES)


def load_columns(rank, count):
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.zeros(300, 100), mesh, [Shard(1)])}
    dcp.load(state, storage_reader=ZarrStorageReader("x.zarr"))
    assert torch.equal(state["w"].full_tensor(), WHOLE)


def load_boxes(rank, count):
    state = {"w": boxed(torch.zeros(300, 100))}
    dcp.load(state, storage_reader=ZarrStorageReader("x.zarr"))
    for local in state["w"].local_shards():
        assert torch.equal(local.tensor, WHOLE[place(local)])


def test_uneven_boxes_some_on_one_rank_load_on_other_processes(tmp_path):
    processes.run(2, tmp_path, save_boxes)
    assert torch.equal(dcp_zarr.load(tmp_path / "x.zarr")["w"], WHOLE)
    processes.run(3, tmp_path, load_columns)


def test_plain_and_distributed_tensors_load_as_uneven_boxes(tmp_path):
    dcp_zarr.save({"w": WHOLE}, tmp_path / "x.zarr")
    processes.run(2, tmp_path, load_boxes)
