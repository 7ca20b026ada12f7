"""Real gloo processes."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_zarr
from dcp_zarr import ZarrStorageReader, ZarrStorageWriter
from tests import processes

pytestmark = pytest.mark.dist


def whole_tensors():
    torch.manual_seed(0)
    return {
        "rows": torch.randn(10, 3),
        "columns": torch.randn(7, 5),
        "prime": torch.randn(4001, 64).bfloat16(),
        "replicated": torch.randn(4, 4),
        "one": torch.randn(1),
    }


PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "prime": [Shard(0)],
    "replicated": [Replicate()],
    "one": [Shard(0)],
}


def distributed(tensors, mesh):
    return {k: distribute_tensor(v, mesh, PLACEMENTS[k]) for k, v in tensors.items()}


def save_distributed(rank, count, path):
    mesh = init_device_mesh("cpu", (count,))
    state = {"model": distributed(whole_tensors(), mesh), "step": 3, "names": ("a", rank)}
    metadata = dcp.save(state, storage_writer=dcp_zarr.storage_writer(path))
    assert metadata == dcp_zarr.storage_reader(path).read_metadata()


def load_distributed(rank, count, path):
    mesh = init_device_mesh("cpu", (count,))
    expected = whole_tensors()
    zeros = {k: torch.zeros_like(v) for k, v in expected.items()}
    state = {"model": distributed(zeros, mesh), "step": 0}
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path))
    assert state["step"] == 3
    for name, tensor in state["model"].items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name


@pytest.mark.parametrize(("n", "m"), [(4, 3), (2, 5), (1, 2)])
def test_dtensors_saved_on_n_processes_load_on_m(tmp_path, n, m, path):
    processes.run(n, tmp_path, save_distributed, path)
    processes.run(m, tmp_path, load_distributed, path)
    loaded = dcp_zarr.load(tmp_path / path, "model")["model"]
    for name, tensor in whole_tensors().items():
        assert torch.equal(loaded[name], tensor)


def record_writes(rank, count, path):
    """Save while every write to a file is noted: path, offset, length."""
    writes = []
    real = os.pwritev

    def pwritev(fd, buffers, offset):
        written = real(fd, buffers, offset)
        writes.append((os.readlink(f"/proc/self/fd/{fd}"), offset, written))
        return written

    os.pwritev = pwritev
    mesh = init_device_mesh("cpu", (count,))
    state = {
        f"w{n}": distribute_tensor(torch.randn(4096, 512), mesh, [Shard(n % 2)]) for n in range(4)
    }
    state["cut"] = distribute_tensor(torch.randn(4001, 512), mesh, [Shard(0)])
    writer = dcp_zarr.storage_writer(path, compression=None)
    planned = {}
    prepare = writer.prepare_global_plan

    def prepare_global_plan(plans):
        mapped = prepare(plans)
        for plan in mapped:
            planned[plan.storage_data.rank] = sum(
                a.region.volume * a.array.itemsize
                for a in plan.storage_data.assignments(plan.items)
            )
        return mapped

    writer.prepare_global_plan = prepare_global_plan
    before_finish = []
    finish = writer.finish
    writer.finish = lambda **results: (before_finish.append(len(writes)), finish(**results))
    dcp.save(state, storage_writer=writer)
    cut = before_finish[0] if before_finish else len(writes)
    Path(f"writes-{rank}.json").write_text(json.dumps([writes[:cut], writes[cut:], planned]))


def test_ranks_write_their_own_bytes_in_parallel_and_no_byte_has_two_writers(tmp_path, path):
    processes.run(4, tmp_path, record_writes, path)
    records = [json.loads((tmp_path / f"writes-{rank}.json").read_text()) for rank in range(4)]
    planned = {int(rank): nbytes for rank, nbytes in records[0][2].items()}
    for rank, (own, _, _) in enumerate(records):
        written = sum(nbytes for _, _, nbytes in own)
        assert written == pytest.approx(planned[rank], rel=0.1)
    ranges = sorted(tuple(w) for own, extra, _ in records for w in own + extra)
    for (path, offset, nbytes), (next_path, next_offset, _) in pairwise(ranges):
        assert path != next_path or offset + nbytes <= next_offset
    coordinators_extra = sum(nbytes for _, _, nbytes in records[0][1])
    assert coordinators_extra < 4001 * 512 * 4 / 8 + (1 << 20)
    assert not any(extra for _, extra, _ in records[1:])


def fail_on_one_rank(rank, count, path):
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=dcp_zarr.storage_writer(path))
    if rank == 1:

        def refuse(*_):
            raise OSError(28, "No space left on device")

        os.pwritev = refuse
    with pytest.raises(dcp.CheckpointException, match="No space left on device"):
        dcp.save(
            {"w": torch.zeros(64, 8), "v": state["w"]},
            storage_writer=dcp_zarr.storage_writer(path),
        )


def test_a_failure_on_one_rank_reaches_all_and_leaves_the_old_checkpoint(tmp_path, path):
    processes.run(3, tmp_path, fail_on_one_rank, path)
    assert list(dcp_zarr.open_checkpoint(tmp_path / path)) == ["w"]
    assert dcp_zarr.load(tmp_path / path)["w"].any()


def mismatched_options(rank, count):
    compression = "fast" if rank == 0 else "small"
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)])}
    with pytest.raises(dcp.CheckpointException, match="Give all ranks the same options"):
        dcp.save(state, storage_writer=ZarrStorageWriter("x.zarr", compression=compression))


def test_ranks_with_other_options_are_refused_on_all(tmp_path):
    processes.run(2, tmp_path, mismatched_options)
    assert not (tmp_path / "x.zarr").exists()


def without_collectives(rank, count):
    with pytest.raises(BaseException, match="without use_collectives=False"):
        dcp.save(
            {"w": torch.ones(2)},
            storage_writer=ZarrStorageWriter("x.zarr"),
            use_collectives=False,
        )


@pytest.mark.skipif(
    torch.__version__.startswith("2.7."), reason="torch 2.7 has no saves without collectives"
)
def test_saving_without_collectives_is_refused_on_all_ranks(tmp_path):
    processes.run(2, tmp_path, without_collectives)


def load_module(rank, count):
    torch.manual_seed(rank)
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model)
    report = dcp_zarr.load_into(model, "x.zarr", "model")
    assert len(report.loaded) == 4
    expected = dcp_zarr.load("x.zarr", "model")["model"]
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter.full_tensor(), expected[name])
    dist.barrier()


def test_load_into_fills_a_module_that_is_spread_over_ranks(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    dcp_zarr.save({"model": model.state_dict()}, tmp_path / "x.zarr")
    processes.run(2, tmp_path, load_module)


def save_model_in_two_dimensions(rank, count):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("fsdp", "tp"))

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.Linear(6, 5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(3, 7)).sum().backward()
        optimizer.step()
        return model, optimizer

    def full(state):
        return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}

    model, optimizer = make(0)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    state = {"model": saved_model, "optimizer": saved_optimizer}
    dcp.save(state, storage_writer=ZarrStorageWriter("x.zarr"))
    expected = {k: v.clone() for k, v in full(saved_model).items()}
    other_model, other_optimizer = make(1)
    model_state, optimizer_state = get_state_dict(other_model, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=ZarrStorageReader("x.zarr"))
    set_state_dict(
        other_model,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for name, tensor in full(other_model.state_dict()).items():
        assert torch.equal(tensor, expected[name]), name
    if rank == 0:
        loaded = dcp_zarr.load("x.zarr", "model")["model"]
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.skipif(
    torch.__version__.startswith("2.7."), reason="torch 2.7 cuts evenly only on two axes of ranks"
)
def test_a_model_under_fsdp_and_tensor_parallel_trains_saves_and_resumes(tmp_path):
    processes.run(4, tmp_path, save_model_in_two_dimensions)


def save_replicated(rank, count):
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(70.0).reshape(7, 10)
    state = {"hsdp": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}
    state["all"] = distribute_tensor(whole, init_device_mesh("cpu", (count,)), [Shard(1)])
    dcp.save(state, storage_writer=ZarrStorageWriter("x.zarr"))


def test_replicas_are_written_once(tmp_path):
    processes.run(4, tmp_path, save_replicated)
    loaded = dcp_zarr.load(tmp_path / "x.zarr")
    whole = torch.arange(70.0).reshape(7, 10)
    assert torch.equal(loaded["hsdp"], whole)
    assert torch.equal(loaded["all"], whole)
    regions = dcp_zarr.open_checkpoint(tmp_path / "x.zarr")["hsdp"].regions
    assert [str(region) for region in regions] == ["[0:4, 0:10]", "[4:7, 0:10]"]
