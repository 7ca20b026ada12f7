"""Saves beside each other, and saves one after the other for as long as a job runs."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from concurrent import futures
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_zarr

MIB = 1 << 20


class MeetingPlanner(DefaultSavePlanner):
    """Writes only once all saves are about to."""

    def __init__(self, met):
        super().__init__()
        self._met = met

    def finish_plan(self, plan):
        self._met.wait(timeout=60)
        return super().finish_plan(plan)


def values(step):
    return {"large": torch.full((700, 1000), float(step)), "small": [torch.tensor(step), step]}


def test_two_saves_in_flight_hold_the_values_of_their_moments(path):
    met = threading.Barrier(2)
    state = values(0)
    pending = []
    for step in range(2):
        planner = MeetingPlanner(met)
        writer = dcp_zarr.storage_writer(f"{step}-{path}", thread_count=2)
        pending.append(dcp.async_save(state, storage_writer=writer, planner=planner))
        state["large"] += 1
        state["small"][0] += 1
        state["small"][1] += 1
    futures.wait(pending)
    for step, future in enumerate(pending):
        assert future.result().storage_meta.checkpoint_id.endswith(f"{step}-{path}")
        assert str(dcp_zarr.load(f"{step}-{path}")) == str(values(step))
        assert (dcp_zarr.load(f"{step}-{path}")["large"] == step).all()


def save(state, path):
    dcp.save(state, storage_writer=dcp_zarr.storage_writer(path, sync_files=False), no_dist=True)


def save_asynchronously(state, path):
    dcp.async_save(state, storage_writer=dcp_zarr.storage_writer(path, sync_files=False)).result()


def resident_bytes():
    """Return what this process holds, less what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("save", "path"),
    [
        (save, "x.zarr"),
        (save_asynchronously, "x.zarr"),
        (save_asynchronously, "x.zarr.zip"),
        (save_asynchronously, "x.h5"),
    ],
)
def test_saves_in_a_row_keep_neither_memory_nor_open_files(save, path):
    state = {"w": torch.zeros(4 * MIB), "o": (1, 2)}
    seen = {}
    for step in range(1, 21):
        state["w"].random_()
        save(state, path)
        seen[step] = resident_bytes(), open_files()
    assert torch.equal(dcp_zarr.load(path)["w"], state["w"])
    assert seen[20][0] - seen[5][0] < 32 * MIB
    assert seen[20][1] == seen[5][1]
