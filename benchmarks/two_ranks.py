"""Saves and loads of one sharded state by two processes, as FSDP2 shards it."""

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

from benchmarks.peers import Act, Peer, empty_files, h5py_peer, our_peer, torch_peer
from benchmarks.workloads import WORKLOADS, State, check_equal

RANKS = 2

Times = dict[str, list[list[float]]]
"""Wall seconds by peer: of saves, and of loads."""
Shapes = dict[str, torch.Size]
"""Of the whole tensors."""


def measure(workload: str, directory: Path, rounds: int, *, quick: bool) -> Times:
    """Return what saves and loads take, from a barrier to the end of the slower rank."""
    scratch = Path(mkdtemp(dir=directory))
    context = multiprocessing.spawn(  # type: ignore[no-untyped-call]
        _rank, (workload, scratch, rounds, quick), nprocs=RANKS, join=False
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


def _peers(workload: str) -> list[Peer]:
    ours = [our_peer("fast", no_dist=False)]
    if workload == "gpt":
        ours.insert(0, our_peer(None, no_dist=False))
        codecs = (None, "fast", "small")
        ours += [our_peer(codec, suffix=".h5", no_dist=False) for codec in codecs]
        ours += [h5py_peer(None), h5py_peer(1)]
    return [torch_peer(no_dist=False), *ours]


def _rank(rank: int, workload: str, scratch: Path, rounds: int, quick: bool) -> None:  # noqa: FBT001
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    torch.set_num_threads(1)
    rendezvous = f"file://{scratch}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = WORKLOADS[workload](quick=quick)
    shapes = {fqn: tensor.shape for fqn, tensor in state.items()}
    local = {fqn: t.chunk(RANKS)[rank].clone() if t.ndim else t for fqn, t in state.items()}
    del state
    peers = _peers(workload)
    times: Times = {peer.name: [[], []] for peer in peers}
    for number in range(-1, rounds):  # the first is not counted
        for peer in peers if number % 2 else peers[::-1]:
            if peer.slow and number != 0:
                continue
            path = scratch / f"{number}-{peers.index(peer)}"
            both = _once(peer, local, shapes, mesh, path)
            if number >= 0:
                for seconds, wall_s in zip(times[peer.name], both, strict=True):
                    seconds.append(wall_s)
    if rank == 0:
        (scratch / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def _once(
    peer: Peer, local: State, shapes: Shapes, mesh: DeviceMesh, path: Path
) -> tuple[float, float]:
    os.sync()
    save_s = _seconds(peer.save, _sharded(local, shapes, mesh), path)
    found = {fqn: torch.zeros_like(tensor) for fqn, tensor in local.items()}
    load_s = _seconds(peer.load, _sharded(found, shapes, mesh), path)
    check_equal(found, local, peer.name)
    dist.barrier()
    if dist.get_rank() == 0:
        for written in path.parent.glob(f"{path.name}*"):
            empty_files(written)
    return save_s, load_s


def _seconds(act: Act, state: State, path: Path) -> float:
    dist.barrier()
    start = time.perf_counter()
    act(state, path)
    wall_s = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    return wall_s.item()


def _sharded(local: State, shapes: Shapes, mesh: DeviceMesh) -> State:
    return {
        fqn: DTensor.from_local(
            part,
            mesh,
            [Shard(0)],
            shape=shapes[fqn],
            stride=torch.empty(shapes[fqn], device="meta").stride(),
        )
        if part.ndim
        else part
        for fqn, part in local.items()
    }
