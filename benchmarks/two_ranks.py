"""Saves of one sharded state by two processes, as FSDP2 shards it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.peers import Peer, empty_files, torch_peer, zarr_peer
from benchmarks.workloads import State, check_equal, large

RANKS = 2

Times = dict[str, list[float]]
"""Wall seconds by peer."""


def measure(directory: Path, rounds: int, *, quick: bool) -> Times:
    """Return what saves of `large` take, from a barrier to the end of the slower rank."""
    scratch = Path(mkdtemp(dir=directory))
    context = multiprocessing.spawn(  # type: ignore[no-untyped-call]
        _rank, (scratch, rounds, quick), nprocs=RANKS, join=False
    )
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    times: Times = json.loads((scratch / "times.json").read_text())
    return times


def _rank(rank: int, scratch: Path, rounds: int, quick: bool) -> None:  # noqa: FBT001
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    torch.set_num_threads(1)
    rendezvous = f"file://{scratch}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    local = {fqn: tensor.chunk(RANKS)[rank].clone() for fqn, tensor in large(quick=quick).items()}
    peers = [torch_peer(no_dist=False), zarr_peer("fast", no_dist=False)]
    times: Times = {peer.name: [] for peer in peers}
    for number in range(-1, rounds):  # the first is not counted
        for peer in peers if number % 2 else peers[::-1]:
            path = scratch / f"{number}-{peers.index(peer)}"
            wall_s = _once(peer, local, mesh, path)
            times[peer.name] += [wall_s] if number >= 0 else []
    if rank == 0:
        (scratch / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def _once(peer: Peer, local: State, mesh: DeviceMesh, path: Path) -> float:
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    peer.save(_sharded(local, mesh), path)
    wall_s = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    found = {fqn: torch.zeros_like(tensor) for fqn, tensor in local.items()}
    peer.load(_sharded(found, mesh), path)
    check_equal(found, local, peer.name)
    dist.barrier()
    if dist.get_rank() == 0:
        empty_files(path)
    return wall_s.item()


def _sharded(local: State, mesh: DeviceMesh) -> State:
    return {fqn: DTensor.from_local(part, mesh, [Shard(0)]) for fqn, part in local.items()}
