"""Large regions that several ranks hold are written by all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_zarr
from dcp_zarr.region import Region
from dcp_zarr.replicas import MIN_SHARE_BYTES
from tests import processes, ranks
from tests.ranks import Part

ROWS = MIN_SHARE_BYTES // 1024  # of 1 KiB each: a share is as many of them


def replicas(whole, count, region=None):
    part = Part(whole, region or Region.whole(tuple(whole.shape)))
    return [{"w": part} for _ in range(count)]


def written(states, path="x.zarr", **options):
    """Plan a save; return for each rank the regions that it writes."""
    _, plans, _ = ranks.plan([dcp_zarr.storage_writer(path, **options) for _ in states], states)
    return [[item.tensor_data.chunk for item in plan.items] for plan in plans]


@pytest.mark.parametrize(
    ("rows", "count", "shares"),
    [
        (4 * ROWS, 4, [ROWS] * 4),
        (4 * ROWS, 2, [2 * ROWS] * 2),
        (4 * ROWS, 8, [ROWS] * 4),
        (3 * ROWS, 2, [3 * ROWS // 2] * 2),
        (ROWS, 2, [ROWS]),
        (2 * ROWS + 1, 2, [ROWS + 1024, ROWS - 1023]),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_each_rank_that_holds_a_region_writes_a_share_of_it(rows, count, shares):
    of_ranks = written(replicas(torch.zeros(rows, 256), count))
    boxes = sorted((box.offsets[0], box.sizes[0]) for of_rank in of_ranks for box in of_rank)
    assert [size for _, size in boxes] == shares
    assert all(a + size == b for (a, size), (b, _) in pairwise(boxes))
    assert max(map(len, of_ranks)) == 1


def test_shares_of_a_row_are_cut_along_the_next_axis():
    of_ranks = written(replicas(torch.zeros(1, 4 * ROWS, 256), 4))
    assert {tuple(box.sizes) for (box,) in of_ranks} == {(1, ROWS, 256)}


def test_a_region_among_others_is_cut_only_where_all_read_chunks_fit():
    whole = torch.zeros(2 * (2 * ROWS + 1), 256)  # halves of a length without a good divisor
    halves = ranks.grid(tuple(whole.shape), (2, 1))
    of_ranks = written([{"w": Part(whole, half)} for half in halves for _ in range(2)])
    assert sum(map(len, of_ranks)) == 2


def test_a_shorter_last_region_is_not_cut_where_read_chunks_would_be():
    whole = torch.zeros(50257, 256)  # halves of 13 * 1933 and of 25128 rows
    halves = ranks.grid(tuple(whole.shape), (2, 1))
    states = [{"w": Part(whole, half)} for half in halves for _ in range(4)]
    _, plans, _ = ranks.plan([dcp_zarr.storage_writer("x.zarr") for _ in states], states)
    assert not sum(a.pieces_nbytes for p in plans for a in p.storage_data.assignments(p.items))


def test_a_plain_tensor_is_written_by_one_rank():
    of_ranks = written([{"w": torch.zeros(4 * ROWS, 256)} for _ in range(2)])
    assert sorted(map(len, of_ranks)) == [0, 1]


def test_equal_plain_tensors_are_shared_out_where_that_is_asked_for(path):
    whole = torch.randn(4 * ROWS, 256)
    states = [{"w": whole.clone()} for _ in range(2)]
    assert [len(boxes) for boxes in written(states, path, share_plain_tensors=True)] == [1, 1]
    ranks.save(lambda: dcp_zarr.storage_writer(path, share_plain_tensors=True), states)
    assert torch.equal(dcp_zarr.load(path)["w"], whole)


def test_ranks_that_write_most_get_the_last_shares():
    whole, other = torch.zeros(2 * ROWS, 256), torch.zeros(8 * ROWS, 256)
    states = replicas(whole, 3)
    states[0]["a"] = Part(other, Region.whole(tuple(other.shape)))
    first, *others = written(states)
    assert (len(first), list(map(len, others))) == (1, [1, 1])


@pytest.mark.parametrize("statistics", [False, True])
def test_shares_come_back_bit_for_bit_and_metadata_says_what_dcp_planned(path, statistics):
    whole = torch.randn(5 * ROWS + 3, 256)
    halves = ranks.grid(tuple(whole.shape), (2, 1))
    states = [
        {"all": Part(whole, Region.whole(tuple(whole.shape))), "half": Part(whole, half)}
        for half in halves
        for _ in range(2)
    ]
    metadata = ranks.save(lambda: dcp_zarr.storage_writer(path, statistics=statistics), states)
    assert dcp_zarr.storage_reader(path).read_metadata() == metadata
    assert len(metadata.state_dict_metadata["all"].chunks) == 1
    loaded = dcp_zarr.load(path)
    assert torch.equal(loaded["all"], whole)
    assert torch.equal(loaded["half"], whole)
    checkpoint = dcp_zarr.open_checkpoint(path)
    checkpoint.verify()
    assert [str(region) for region in checkpoint["all"].regions] == [f"[0:{5 * ROWS + 3}, 0:256]"]


def save_with_cached_plans(rank, count, fresh):
    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(2 * ROWS * 256).reshape(2 * ROWS, 256)
    kept = dcp_zarr.storage_writer("x.zarr")
    for step in range(3):
        state = {"w": distribute_tensor(whole + step, mesh, [Replicate()])}
        if not fresh and step == 1 and rank == 1:
            state = {"other": torch.zeros(3)}
        path = f"x{step}.zarr"
        kept.reset(path)
        writer = dcp_zarr.storage_writer(path) if fresh else kept
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        metadata = dcp.save(state, storage_writer=writer, planner=planner)
        assert rank or dcp_zarr.storage_reader(path).read_metadata() == metadata


@pytest.mark.parametrize("fresh", [True, False], ids=["new writers", "a replica less"])
def test_cached_plans_with_shares(tmp_path, fresh):
    processes.run(2, tmp_path, save_with_cached_plans, fresh)
    whole = torch.arange(2 * ROWS * 256).reshape(2 * ROWS, 256)
    for step in range(3):
        assert torch.equal(dcp_zarr.load(tmp_path / f"x{step}.zarr")["w"], whole + step)


def save_on_a_mesh(rank, count):
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = torch.randn(8 * ROWS, 256)
    planner = {"planner": dcp.DefaultSavePlanner(enable_plan_caching=True)}
    for step in range(3):
        state = {"hsdp": distribute_tensor(whole + step, mesh, [Replicate(), Shard(0)])}
        state["all"] = distribute_tensor(whole - step, mesh, [Replicate(), Replicate()])
        writer = dcp_zarr.storage_writer(f"x{step}.zarr")
        if step == 0:
            kept = writer
        kept.reset(f"x{step}.zarr")
        dcp.save(state, storage_writer=kept, **planner)


def test_real_ranks_share_out_with_a_plan_cache_too(tmp_path):
    processes.run(4, tmp_path, save_on_a_mesh)
    torch.manual_seed(0)
    whole = torch.randn(8 * ROWS, 256)
    for step in range(3):
        loaded = dcp_zarr.load(tmp_path / f"x{step}.zarr")
        assert torch.equal(loaded["hsdp"], whole + step)
        assert torch.equal(loaded["all"], whole - step)


def test_ranks_that_do_not_all_share_plain_tensors_are_refused():
    states = [{"w": torch.zeros(4 * ROWS, 256)} for _ in range(2)]
    writers = [
        dcp_zarr.ZarrStorageWriter("x.zarr", share_plain_tensors=plain) for plain in (True, False)
    ]
    planners, plans, _ = ranks.plan(writers, states)
    with pytest.raises(dcp_zarr.SaveError, match="Give all ranks the same options"):
        writers[1].write_data(plans[0], planners[1]).wait()
