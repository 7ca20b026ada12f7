"""Saves and loads of one sharded state by several gloo processes, as FSDP2 shards it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.array_peers import h5py_peer
from benchmarks.one_process import spread
from benchmarks.peers import TORCH, Act, Peer, empty_files
from benchmarks.torch_peers import our_peer, torch_peer
from benchmarks.workloads import WORKLOADS, State, check_equal

Times = dict[str, list[list[float]]]
"""Wall seconds by peer: of saves, and of loads."""


def section(
    workload: str, ranks: int, directory: Path, place: str, *, rounds: int, quick: bool
) -> str:
    """Measure, and return as Markdown, from a barrier to the end of the slowest rank."""
    scratch = Path(mkdtemp(dir=directory))
    times: Times = on_ranks(ranks, scratch, _rounds, workload, rounds, quick)
    rows = []
    for name, (save_s, load_s) in times.items():
        by = [
            median(t) / median(taken)
            for t, taken in zip(times[TORCH], (save_s, load_s), strict=True)
        ]
        rows.append(
            f"| {name} | {spread(save_s)} | {by[0]:.2f} | {spread(load_s)} | {by[1]:.2f} |\n"
        )
    title = f"`{workload}` as Shard(0) on {ranks} gloo processes, {place}"
    header = "| | save s | x torch | load s | x torch |\n|---|---|---|---|---|\n"
    return f"## {title}\n\n{header}{''.join(rows)}"


def resharding(directory: Path, place: str, *, rounds: int, quick: bool) -> str:
    """Load on 3 processes what 4 saved, and what 3 saved; return it as Markdown."""
    scratch = Path(mkdtemp(dir=directory))
    on_ranks(4, scratch, _save_all, "gpt", quick)
    times: Times = on_ranks(3, scratch, _load_both, "gpt", rounds, quick)
    rows = [
        f"| {name} | {spread(same)} | {spread(other)} | {median(other) / median(same):.2f} |\n"
        for name, (same, other) in times.items()
    ]
    return (
        f"## `gpt` loaded as Shard(0) on 3 gloo processes, {place}\n\n"
        "| | saved by 3: s | saved by 4: s | ratio |\n|---|---|---|---|\n" + "".join(rows)
    )


def on_ranks(ranks: int, scratch: Path, body: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
    """Run a function on so many gloo processes; return what it returned on the first, by JSON."""
    context = multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        _rank, (ranks, scratch, body, args), nprocs=ranks, join=False, start_method="forkserver"
    )
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return json.loads((scratch / "returned.json").read_text())


def _rank(
    rank: int, ranks: int, scratch: Path, body: Callable[..., Any], args: tuple[object, ...]
) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(1)
    rendezvous = f"file://{scratch}/rendezvous-{ranks}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    returned = body(scratch, *args)
    if rank == 0:
        (scratch / "returned.json").write_text(json.dumps(returned))
    dist.destroy_process_group()


class _Sharded:
    """A state of which each rank holds its rows."""

    def __init__(self, workload: str, *, quick: bool) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._mesh = init_device_mesh("cpu", (ranks,))
        whole = WORKLOADS[workload](quick=quick)
        self._shapes = {fqn: tensor.shape for fqn, tensor in whole.items()}
        self.local = {
            fqn: _rows(tensor, ranks, rank) if tensor.ndim else tensor
            for fqn, tensor in whole.items()
        }
        self.empty = {fqn: torch.zeros_like(tensor) for fqn, tensor in self.local.items()}

    def state(self, local: State) -> State:
        """Return this rank's part as DTensors."""
        return {
            fqn: _dtensor(part, self._mesh, self._shapes[fqn]) if part.ndim else part
            for fqn, part in local.items()
        }

    def save(self, peer: Peer, path: Path) -> float:
        """Save with a peer; return the seconds of the slowest rank."""
        return _seconds(peer.save, self.state(self.local), path)

    def load(self, peer: Peer, path: Path) -> float:
        """Load with a peer, and check it; return the seconds of the slowest rank."""
        for tensor in self.empty.values():
            tensor.zero_()
        taken = _seconds(peer.load, self.state(self.empty), path)
        check_equal(self.empty, self.local, peer.name)
        dist.barrier()
        return taken


def _rows(tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    parts = tensor.chunk(ranks)
    return parts[rank].clone() if rank < len(parts) else tensor[:0].clone()


def _dtensor(part: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride)


def _rounds(scratch: Path, workload: str, rounds: int, quick: bool) -> Times:  # noqa: FBT001
    sharded = _Sharded(workload, quick=quick)
    peers = _peers(workload)
    times: Times = {peer.name: [[], []] for peer in peers}
    for number in range(0 if quick else -1, rounds):  # the first is not counted
        for peer in peers if number % 2 else peers[::-1]:
            if "gzip" in peer.name and number:
                continue
            path = scratch / f"{number}-{peers.index(peer)}"
            os.sync()
            both = sharded.save(peer, path), sharded.load(peer, path)
            if dist.get_rank() == 0:
                for written in scratch.glob(f"{path.name}*"):
                    empty_files(written)
            for taken, wall_s in zip(times[peer.name], both, strict=True):
                if number >= 0:
                    taken.append(wall_s)
    return times


def _save_all(scratch: Path, workload: str, quick: bool) -> None:  # noqa: FBT001
    sharded = _Sharded(workload, quick=quick)
    for number, peer in enumerate(_resharding_peers()):
        sharded.save(peer, scratch / f"{number}-of-{dist.get_world_size()}")


def _load_both(scratch: Path, workload: str, rounds: int, quick: bool) -> Times:  # noqa: FBT001
    """Load in turns what as many ranks saved and what other ranks saved."""
    _save_all(scratch, workload, quick)
    sharded = _Sharded(workload, quick=quick)
    peers = _resharding_peers()
    times: Times = {peer.name: [[], []] for peer in peers}
    for number in range(0 if quick else -1, rounds):  # the first is not counted
        for place, peer in enumerate(peers):
            for kind, saved_by in ((0, 3), (1, 4))[:: 1 if number % 2 else -1]:
                taken = sharded.load(peer, scratch / f"{place}-of-{saved_by}")
                if number >= 0:
                    times[peer.name][kind].append(taken)
    return times


def _peers(workload: str) -> list[Peer]:
    codecs = (None, "fast", "small")
    ours = [our_peer("fast", no_dist=False)]
    if workload != "large":
        ours = [our_peer(codec, no_dist=False) for codec in codecs[:2]]
        ours += [our_peer("fast", suffix=".zip", no_dist=False)]
        ours += [our_peer(codec, suffix=".h5", no_dist=False) for codec in codecs]
        ours += [h5py_peer(None), h5py_peer(1)]
    return [torch_peer(no_dist=False), *ours]


def _resharding_peers() -> list[Peer]:
    ours = [our_peer(codec, no_dist=False) for codec in (None, "fast", "small")]
    ours += [our_peer("fast", no_dist=False, read_chunk_bytes=256 << 10)]
    ours += [our_peer("fast", suffix=".zip", no_dist=False)]
    ours += [our_peer(codec, suffix=".h5", no_dist=False) for codec in (None, "small")]
    return [torch_peer(no_dist=False), *ours]


def _seconds(act: Act, state: State, path: Path) -> float:
    dist.barrier()
    start = time.perf_counter()
    act(state, path)
    wall_s = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    return wall_s.item()
