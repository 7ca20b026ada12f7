"""What the end of a save to HDF5 takes where read chunks are many."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

import dcp_zarr
from benchmarks.memory import forget_peak, peak_nbytes

TENSORS, READ_CHUNKS, READ_CHUNK_BYTES = 2_000, 50, 1024


class _Timed(dcp_zarr.HDF5StorageWriter):
    """Notes what `finish` takes: seconds, and memory beyond what there was."""

    def finish(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        before, start = forget_peak(), time.perf_counter()
        super().finish(*args, **kwargs)
        self.seconds = time.perf_counter() - start
        self.nbytes = peak_nbytes() - before


def section(directory: Path, place: str, *, quick: bool) -> str:
    """Save many read chunks; return what the end of it took."""
    tensors = 20 if quick else TENSORS
    random = torch.Generator().manual_seed(4)
    elements = READ_CHUNKS * READ_CHUNK_BYTES // 4
    state = {
        f"model.layers.{number // 10}.w{number % 10}": torch.randn(elements, generator=random)
        for number in range(tensors)
    }
    writer = _Timed(directory / "chunks.h5", read_chunk_bytes=READ_CHUNK_BYTES)
    dcp.save(state, storage_writer=writer, no_dist=True)
    count = f"{tensors * READ_CHUNKS:,} read chunks in {tensors:,} tensors"
    return (
        f"## HDF5: {count}, {place}\n\nThe coordinator's `finish`: {writer.seconds:.2f} s, and "
        f"{writer.nbytes / 1e6:.0f} MB of memory.\n"
    )
