"""torch's own ways to save, and dcp_zarr's: what `torch.distributed.checkpoint` and torch call."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import dcp_zarr
from benchmarks.peers import TORCH, Peer, copy

if TYPE_CHECKING:
    from benchmarks.workloads import State

_DEFAULTS = {("fast", ""), ("fast", ".zip"), ("small", ".h5")}


def torch_peer(*, threads: int = 1, no_dist: bool = True) -> Peer:
    """Return torch's own storage, at its defaults but for the threads that write."""
    name = TORCH + f", {threads} threads" * (threads > 1)
    return _dcp_peer(
        name,
        lambda path: dcp.FileSystemWriter(path, thread_count=threads),
        dcp.FileSystemReader,
        no_dist=no_dist,
    )


def zstd_peer() -> Peer:
    """Return torch's own storage with its extension that compresses streams, on 2 threads."""
    return _dcp_peer(
        f"{TORCH}, 2 threads, zstd",
        lambda path: dcp.FileSystemWriter(path, thread_count=2, _extensions=[ZStandard()]),
        dcp.FileSystemReader,
        package="zstandard",
    )


def hugging_face_peer(state: State) -> Peer:
    """Return torch's storage of safetensors: two files of about the same size, on 2 threads."""
    total = sum(tensor.nbytes for tensor in state.values())
    files, before = {}, 0
    for fqn, tensor in state.items():
        files[fqn] = 1 if 2 * before < total else 2
        before += tensor.nbytes
    return _dcp_peer(
        "HuggingFaceStorageWriter / Reader, 2 threads",
        lambda path: dcp.HuggingFaceStorageWriter(
            str(path), fqn_to_index_mapping=files, thread_count=2
        ),
        lambda path: dcp.HuggingFaceStorageReader(str(path), thread_count=2),
        package="safetensors",
    )


def our_peer(
    compression: str | None,
    *,
    suffix: str = "",
    no_dist: bool = True,
    **options: Any,  # noqa: ANN401
) -> Peer:
    """Return dcp_zarr with one compression, and other options at their defaults."""
    name = f"dcp_zarr {compression}" + f", {suffix}" * bool(suffix)
    name += "".join(
        f", {option}" if value is True else f", {option} {value}"
        for option, value in options.items()
    )
    name += " (all defaults)" * ((compression, suffix) in _DEFAULTS and not options)
    return _dcp_peer(
        name,
        lambda path: dcp_zarr.storage_writer(f"{path}{suffix}", compression=compression, **options),
        lambda path: dcp_zarr.storage_reader(f"{path}{suffix}"),
        no_dist=no_dist,
    )


def pickle_peer() -> Peer:
    """Return ``torch.save``, synced, and ``torch.load`` of a mapped file, copied from there."""

    def save(state: State, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(state: State, path: Path) -> None:
        copy(torch.load(path, mmap=True, weights_only=True), state)

    return Peer("torch.save, fsync / load(mmap), copy", save, load)


def _dcp_peer(
    name: str,
    writer: Callable[[Path], Any],
    reader: Callable[[Path], Any],
    *,
    no_dist: bool = True,
    package: str = "",
) -> Peer:
    def save(state: State, path: Path) -> None:
        dcp.save(dict(state), storage_writer=writer(path), no_dist=no_dist)

    def load(state: State, path: Path) -> None:
        dcp.load(dict(state), storage_reader=reader(path), no_dist=no_dist)

    return Peer(name, save, load, package, writer)
