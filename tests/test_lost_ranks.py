"""Ranks that are slow or die: the others hear of it in time, and nothing is lost."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from tests import processes

pytestmark = pytest.mark.dist

TIMEOUT_S = 4


def save_with_one_lost(rank, count, path, fate):
    mesh = init_device_mesh("cpu", (count,))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    values = distribute_tensor(torch.ones(401, 7), mesh, [Shard(0)])
    dcp_zarr.save({"w": values}, path, process_group=group)

    def lost(*_):
        if fate == "dies":
            os._exit(0)
        time.sleep(2 * TIMEOUT_S)
        raise OSError(5, "Input/output error")

    if rank == count - 1:
        os.pwritev = lost
    began = time.monotonic()
    with pytest.raises(BaseException) as caught:
        dcp_zarr.save({"w": values * 2}, path, process_group=group)
    assert not isinstance(caught.value, SystemExit)
    took = time.monotonic() - began
    if rank < count - 1:
        assert took < 2 * TIMEOUT_S, took
        Path(f"told-{rank}").write_text(repr(caught.value))


@pytest.mark.parametrize("fate", ["dies", "is slow"])
def test_the_others_hear_of_a_rank_that_is_lost(tmp_path, path, fate):
    processes.run(3, tmp_path, save_with_one_lost, path, fate)
    assert [Path(f"told-{rank}").exists() for rank in range(3)] == [True, True, False]
    assert (dcp_zarr.load(path)["w"] == 1).all()
    dcp_zarr.save({"w": torch.zeros(3)}, path)
    assert not dcp_zarr.load(path)["w"].any()
    assert not [name for name in os.listdir() if name.startswith(f".{path}")]
