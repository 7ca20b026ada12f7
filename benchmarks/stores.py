"""Times of saves and loads on a server of S3's API on loopback, and the requests that they take.

``python -m benchmarks.stores``, where moto and s3fs are installed. The peer is torch's fsspec
writer and reader, with s3fs. The server is a process of its own on the same cores, and in Python:
it is what limits a save.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import dcp_zarr
from tests.s3_server import Server

ROUNDS = 3


def state(count: int, rows: int) -> dict[str, torch.Tensor]:
    """Return tensors of 4,096 columns of bfloat16."""
    torch.manual_seed(0)
    return {f"layers.{n}.w": torch.randn(rows, 4096).bfloat16() for n in range(count)}


def main() -> None:
    """Print a line for each workload and kind."""
    server = Server()
    os.environ.update(server.environment)
    try:
        for name, saved in {
            "4 tensors of 32 MB": state(4, 4096),
            "200 tensors of 64 KB": state(200, 8),
        }.items():
            compare(name, saved, server)
    finally:
        server.close()


def compare(name: str, saved: dict[str, torch.Tensor], server: Server) -> None:
    """Save and load in turn with each kind; medians of interleaved rounds."""
    key = name.replace(" ", "-")
    writers: dict[str, Callable[[], Any]] = {
        "fsspec": lambda: FsspecWriter(f"s3://bucket/{key}/torch"),
        "None": lambda: dcp_zarr.ZarrStorageWriter(f"s3://bucket/{key}/0.zarr", compression=None),
        "fast": lambda: dcp_zarr.ZarrStorageWriter(f"s3://bucket/{key}/1.zarr"),
    }
    readers: dict[str, Callable[[], Any]] = {
        "fsspec": lambda: FsspecReader(f"s3://bucket/{key}/torch"),
        "None": lambda: dcp_zarr.ZarrStorageReader(f"s3://bucket/{key}/0.zarr"),
        "fast": lambda: dcp_zarr.ZarrStorageReader(f"s3://bucket/{key}/1.zarr"),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    requests: dict[tuple[str, str], Counter[str]] = {}
    for _ in range(ROUNDS):
        for kind, writer in writers.items():
            server.requests()
            begun = time.perf_counter()
            dcp.save(dict(saved), storage_writer=writer(), no_dist=True)
            seconds.setdefault((kind, "save"), []).append(time.perf_counter() - begun)
            requests[kind, "save"] = Counter(line.split()[0] for line in server.requests())
        for kind, reader in readers.items():
            target = {fqn: torch.zeros_like(tensor) for fqn, tensor in saved.items()}
            begun = time.perf_counter()
            dcp.load(target, storage_reader=reader(), no_dist=True)
            seconds.setdefault((kind, "load"), []).append(time.perf_counter() - begun)
            requests[kind, "load"] = Counter(line.split()[0] for line in server.requests())
            assert all(torch.equal(target[fqn], saved[fqn]) for fqn in saved)  # noqa: S101
    for act in ("save", "load"):
        for kind in writers:
            of_kind = seconds[kind, act]
            ratio = statistics.median(seconds["fsspec", act]) / statistics.median(of_kind)
            print(
                f"{name}, {act}, {kind}: {statistics.median(of_kind):.3f} s ({min(of_kind):.3f} to "
                f"{max(of_kind):.3f}), {ratio:.2f} x fsspec, {dict(requests[kind, act])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
