"""Disks that fail, on one rank of a real save after the other."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from tests import processes

pytestmark = pytest.mark.dist

OPERATIONS = ["pwritev", "fsync"]


def values(step):
    """Return tensors that are cut, split and whole, and an object that the coordinator packs."""
    rows = torch.arange(401 * 70.0).reshape(401, 70) + step
    return {"cut": rows, "columns": rows.t().contiguous(), "small": rows[0, :3], "o": (step,)}


def save(path, step, mesh):
    state = values(step)
    for fqn in ("cut", "columns"):
        state[fqn] = distribute_tensor(state[fqn], mesh, [Shard(0)])
    dcp_zarr.save(state, path, thread_count=1, read_chunk_bytes=8000)


def fail_once(name, number):
    """Have the call of that number fail as on a broken disk; return how to mend it."""
    real, calls = getattr(os, name), itertools.count(1)

    def operation(*arguments):
        if next(calls) == number:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    setattr(os, name, operation)
    return lambda: setattr(os, name, real)


def fails(path, step, mesh):
    """Save; say whether it failed on this rank."""
    try:
        save(path, step, mesh)
    except dcp_zarr.SaveError as error:
        return "Input/output error" in str(error)
    return False


def on_all(value, count):
    gathered = [None] * count
    dist.all_gather_object(gathered, value)
    return gathered


def fail_at_every_call(rank, count, broken, name, path):
    mesh = init_device_mesh("cpu", (count,))
    save(path, 0, mesh)
    for number in range(1, 100):
        mend = fail_once(name, number) if rank == broken else lambda: None
        failed = on_all(fails(path, number, mesh), count)
        mend()
        if not any(failed):  # there are fewer calls
            break
        assert all(failed)
        assert str(dcp_zarr.load(path)) == str(values(number - 1))
        dist.barrier()
        save(path, number, mesh)
        assert str(dcp_zarr.load(path)) == str(values(number))
        dist.barrier()
    assert number > 1
    assert str(dcp_zarr.load(path)) == str(values(number))


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_disk_that_fails_on_one_rank_leaves_the_old_checkpoint(tmp_path, broken, name, path):
    processes.run(2, tmp_path, fail_at_every_call, broken, name, path)
    assert {*os.listdir(tmp_path)} - {".meet"} == {path}
