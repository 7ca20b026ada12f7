"""Ways to save and load a state; the machine's limits are among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import torch
import torch.distributed as dist
from crc32c import crc32c
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import dcp_zarr
from benchmarks.workloads import State, octets

Act = Callable[[State, Path], None]

TORCH = "FileSystemWriter / Reader"
FILE = "limit: pwrite, fsync / readinto"
THREADS = "limit: the same on 2 threads, with crc32c"
MEMCPY = "limit: memcpy"
_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to save a state at a path that does not exist yet, and to load it in place."""

    name: str
    save: Act
    load: Act
    slow: bool = False
    """Whether one round has to do."""


def peers(workload: str, state: State) -> list[Peer]:
    """Return the peers of a workload."""
    found = [torch_peer(), *map(our_peer, (None, "fast", "small"))]
    found += [our_peer(compression, suffix=".zip") for compression in (None, "fast")]
    found += [our_peer(compression, suffix=".h5") for compression in (None, "fast", "small")]
    if workload == "small":
        found += [h5py_peer(None), h5py_peer(1)]
    if workload == "large":
        found += [our_peer(compression, statistics=True) for compression in (None, "fast")]
        found.append(Peer("safetensors, fsync / copy", _safetensors_save, _safetensors_load))
    file = Peer(FILE, _file_save, _file_load)
    threads = Peer(THREADS, _threads_save, _threads_load)
    return [*found, file, threads, _memcpy_peer(state)]


def torch_peer(*, no_dist: bool = True) -> Peer:
    """Return torch's own storage at its defaults."""
    return _dcp_peer(TORCH, dcp.FileSystemWriter, dcp.FileSystemReader, no_dist=no_dist)


def our_peer(
    compression: str | None, *, suffix: str = "", statistics: bool = False, no_dist: bool = True
) -> Peer:
    """Return dcp_zarr with one compression, and other options at their defaults."""
    name = f"dcp_zarr {compression}" + f", {suffix}" * bool(suffix) + ", statistics" * statistics
    name += " (all defaults)" * (
        (compression, suffix) in (("fast", ""), ("small", ".h5")) and not statistics
    )
    return _dcp_peer(
        name,
        lambda path: dcp_zarr.storage_writer(
            f"{path}{suffix}", compression=compression, statistics=statistics
        ),
        lambda path: dcp_zarr.storage_reader(f"{path}{suffix}"),
        no_dist=no_dist,
    )


def h5py_peer(gzip: int | None) -> Peer:
    """Return one process that writes all tensors with h5py; sharded ones are gathered first.

    bfloat16 goes as unsigned integers, in chunks that h5py chooses, as one would do it by hand.
    """

    def save(state: State, path: Path) -> None:
        whole = {fqn: _gathered(tensor) for fqn, tensor in state.items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            with h5py.File(path, "w") as file:
                for fqn, tensor in whole.items():
                    options = {"compression": "gzip", "compression_opts": gzip, "shuffle": True}
                    file.create_dataset(
                        fqn, data=_bits(tensor), **(options if gzip and tensor.ndim else {})
                    )
            with path.open("rb") as written:
                os.fsync(written.fileno())
        if dist.is_initialized():
            dist.barrier()

    def load(state: State, path: Path) -> None:
        with h5py.File(path) as file:
            for fqn, tensor in state.items():
                local, rows = _local(tensor)
                out = _bits(local)
                if out.size:
                    file[fqn].read_direct(out, rows)

    name = f"h5py, one writer, gzip {gzip}" if gzip else "h5py, one writer"
    return Peer(name, save, load, slow=bool(gzip))


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return this rank's part, and which rows of the whole it is."""
    if not isinstance(tensor, DTensor):
        return tensor, ()
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    return local, slice(offsets[0], offsets[0] + len(local))


def _bits(tensor: torch.Tensor) -> Any:  # noqa: ANN401
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _dcp_peer(
    name: str, writer: Callable[[Path], Any], reader: Callable[[Path], Any], *, no_dist: bool
) -> Peer:
    def save(state: State, path: Path) -> None:
        dcp.save(dict(state), storage_writer=writer(path), no_dist=no_dist)

    def load(state: State, path: Path) -> None:
        dcp.load(dict(state), storage_reader=reader(path), no_dist=no_dist)

    return Peer(name, save, load)


def _safetensors_save(state: State, path: Path) -> None:
    save_file(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _safetensors_load(state: State, path: Path) -> None:
    with safe_open(path, "pt") as file:
        for fqn, tensor in state.items():
            tensor.copy_(file.get_tensor(fqn))


def _file_save(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        offset = 0
        for tensor in state.values():
            offset += os.pwrite(file.fileno(), octets(tensor).numpy().data, offset)
        os.fsync(file.fileno())


def _file_load(state: State, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in state.values():
            file.readinto(octets(tensor).numpy().data)


def _threads_save(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        _on_two_threads(state, partial(os.pwrite, file.fileno()))
        os.fsync(file.fileno())


def _threads_load(state: State, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        _on_two_threads(state, lambda buffer, offset: os.preadv(fd, [buffer], offset))


def _on_two_threads(state: State, move: Callable[[memoryview, int], int]) -> None:
    """Move all tensors between memory and one file, 1 MiB at a time, and sum what was moved."""
    spans, start = [], 0
    for tensor in state.values():
        buffer = octets(tensor).numpy().data
        spans += [(buffer[i : i + _STEP], start + i) for i in range(0, len(buffer), _STEP)]
        start += len(buffer)

    def work(number: int) -> None:
        for buffer, offset in spans[len(spans) * number // 2 : len(spans) * (number + 1) // 2]:
            move(buffer, offset)
            crc32c(buffer)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def _memcpy_peer(state: State) -> Peer:
    """Return copies to and from memory that is there already; the path stays empty."""
    warm = {fqn: tensor.clone() for fqn, tensor in state.items()}
    return Peer(MEMCPY, lambda state, _: _copy(state, warm), lambda state, _: _copy(warm, state))


def _copy(source: State, target: State) -> None:
    for fqn, tensor in source.items():
        target[fqn].copy_(tensor)


def empty_files(directory: Path) -> None:
    """Free the space of all files below a directory, but keep the files.

    ext4 does not reuse inodes for minutes after they are freed, and creates files at a tenth of
    its speed while it steps over many of them: removing one checkpoint would slow the next save.
    """
    for path in [directory, *directory.rglob("*")]:
        if path.is_file():
            os.truncate(path, 0)
