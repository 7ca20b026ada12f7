"""Tensors that only some ranks hold, or in pieces of any size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
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


def save_boxes(rank, count, path):
    writer = dcp_zarr.storage_writer(path, read_chunk_bytes=5000)
    metadata = dcp.save({"w": boxed(WHOLE)}, storage_writer=writer)
    saved = metadata.state_dict_metadata["w"].chunks
    found = [(list(box.offsets), list(box.sizes)) for box in saved]
    assert sorted(found) == sorted((offsets, sizes) for _, offsets, sizes in BOXES)


def load_columns(rank, count, path):
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.zeros(300, 100), mesh, [Shard(1)])}
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path))
    assert torch.equal(state["w"].full_tensor(), WHOLE)


def load_boxes(rank, count, path):
    state = {"w": boxed(torch.zeros(300, 100))}
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path))
    for local in state["w"].local_shards():
        assert torch.equal(local.tensor, WHOLE[place(local)])


def test_uneven_boxes_some_on_one_rank_load_on_other_processes(tmp_path, path):
    processes.run(2, tmp_path, save_boxes, path)
    assert torch.equal(dcp_zarr.load(tmp_path / path)["w"], WHOLE)
    processes.run(3, tmp_path, load_columns, path)


def test_plain_and_distributed_tensors_load_as_uneven_boxes(tmp_path, path):
    dcp_zarr.save({"w": WHOLE}, tmp_path / path)
    processes.run(2, tmp_path, load_boxes, path)


def on_some_ranks(rank, whole):
    """Return a state dict of four ranks: one tensor on the middle two, one on the last two."""
    middle = DeviceMesh("cpu", [1, 2])
    state = {"middle": distribute_tensor(whole, middle, [Shard(0)])}
    row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))["column"]
    if rank >= 2:
        state["row"] = distribute_tensor(whole * 2, row, [Shard(1)])
    return state


def save_on_some_ranks(rank, count, path):
    dcp.save(on_some_ranks(rank, WHOLE), storage_writer=dcp_zarr.storage_writer(path))


def load_on_some_ranks(rank, count, path):
    state = on_some_ranks(rank, torch.zeros_like(WHOLE))
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path))
    own = on_some_ranks(rank, WHOLE)
    for fqn, tensor in state.items():
        assert torch.equal(tensor.to_local(), own[fqn].to_local())
        assert tensor.to_local().numel() == (0 if fqn == "middle" and rank in (0, 3) else 15_000)


def test_tensors_that_only_some_ranks_hold(tmp_path, path):
    processes.run(4, tmp_path, save_on_some_ranks, path)
    checkpoint = dcp_zarr.open_checkpoint(tmp_path / path)
    regions = {
        fqn: [str(region) for region in tensor.regions] for fqn, tensor in checkpoint.items()
    }
    assert regions == {
        "middle": ["[0:150, 0:100]", "[150:300, 0:100]"],
        "row": ["[0:300, 0:50]", "[0:300, 50:100]"],
    }
    loaded = dcp_zarr.load(tmp_path / path)
    assert torch.equal(loaded["middle"], WHOLE)
    assert torch.equal(loaded["row"], WHOLE * 2)
    processes.run(4, tmp_path, load_on_some_ranks, path)
