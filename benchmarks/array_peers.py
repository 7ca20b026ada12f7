"""Libraries of arrays and of tensors, called as one would by hand.

bfloat16 goes as unsigned integers, which all of them know.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
import zarr.buffer.cpu
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.peers import SAFETENSORS, Peer

if TYPE_CHECKING:
    from benchmarks.workloads import State

_READ_CHUNK_BYTES = 4 << 20


def array_peers() -> list[Peer]:
    """Return all of them, for one process."""
    compressed = (False, True)
    return [
        Peer(SAFETENSORS, _safetensors_save, _safetensors_load, "safetensors"),
        *(_zarr_peer("zarr-python", lz4=lz4) for lz4 in compressed),
        *(_zarr_peer("zarrs", lz4=lz4, package="zarrs") for lz4 in compressed),
        *(_tensorstore_peer(lz4=lz4) for lz4 in compressed),
        Peer("Orbax, its defaults, zarr3", _orbax_save, _orbax_load, "orbax"),
        h5py_peer(None),
        h5py_peer(1),
    ]


def _safetensors_save(state: State, path: Path) -> None:
    import_module("safetensors.torch").save_file(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _safetensors_load(state: State, path: Path) -> None:
    with import_module("safetensors").safe_open(path, "pt") as file:
        for fqn, tensor in state.items():
            tensor.copy_(file.get_tensor(fqn))


def _zarr_peer(name: str, *, lz4: bool, package: str = "") -> Peer:
    """Return zarr-python with its own pipeline of codecs, or with that of zarrs; then `sync`."""
    pipeline = (
        "zarrs.ZarrsCodecPipeline" if package else "zarr.core.codec_pipeline.BatchedCodecPipeline"
    )
    using = partial(zarr.config.set, {"codec_pipeline.path": pipeline})

    def save(state: State, path: Path) -> None:
        with using():
            group = zarr.create_group(path, zarr_format=3)
            for fqn, tensor in state.items():
                values = _bits(tensor)
                codec = [_blosc(tensor.itemsize)] if lz4 else None
                group.create_array(
                    fqn, data=values, chunks=_read_chunk_shape(values), compressors=codec
                )
        os.sync()

    def load(state: State, path: Path) -> None:
        with using():
            group = zarr.open_group(path, mode="r")
            for fqn, tensor in state.items():
                out = zarr.buffer.cpu.NDBuffer(_bits(tensor))
                group[fqn].get_basic_selection(out=out)

    return Peer(f"{name}{_COMPRESSED * lz4}, sync", save, load, package)


def _tensorstore_peer(*, lz4: bool) -> Peer:
    """Return TensorStore's zarr3 driver: all tensors at once; it syncs each file."""

    def spec(path: Path, fqn: str) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{fqn}"}}

    def save(state: State, path: Path) -> None:
        tensorstore = import_module("tensorstore")
        opened = []
        for fqn, tensor in state.items():
            values = _bits(tensor)
            codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
            grid = {"chunk_shape": _read_chunk_shape(values)}
            metadata = {
                "shape": values.shape,
                "data_type": values.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": grid},
                "codecs": [*codecs, _blosc(tensor.itemsize)] if lz4 else codecs,
            }
            created = spec(path, fqn) | {"metadata": metadata, "create": True}
            opened.append((tensorstore.open(created), values))
        written = [
            store.result().write(values, can_reference_source_data_indefinitely=True)
            for store, values in opened
        ]
        for pending in written:
            pending.result()

    def load(state: State, path: Path) -> None:
        tensorstore = import_module("tensorstore")
        opened = [
            (tensorstore.open(spec(path, fqn), read=True), tensorstore.array(_bits(tensor)))
            for fqn, tensor in state.items()
        ]
        for pending in [out.write(store.result()) for store, out in opened]:
            pending.result()

    return Peer(f"TensorStore zarr3{_COMPRESSED * lz4}", save, load, "tensorstore")


def _orbax_save(state: State, path: Path) -> None:
    orbax = import_module("orbax.checkpoint")
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(path, {fqn: _bits(tensor) for fqn, tensor in state.items()})


def _orbax_load(state: State, path: Path) -> None:
    orbax = import_module("orbax.checkpoint")
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        found = checkpointer.restore(path)
    for fqn, tensor in state.items():
        np.copyto(_bits(tensor), found[fqn])


def h5py_peer(gzip: int | None) -> Peer:
    """Return one process that writes all tensors with h5py; sharded ones are gathered first.

    Compressed ones have the chunks that h5py chooses.
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
    return Peer(name, save, load)


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


def _read_chunk_shape(values: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return whole rows of about 4 MiB."""
    if not values.ndim:
        return ()
    rows = max(_READ_CHUNK_BYTES // max(values[0].nbytes, 1), 1)
    return (min(rows, len(values)), *values.shape[1:])


_COMPRESSED = ", Blosc LZ4"


def _blosc(itemsize: int) -> dict[str, Any]:
    """Return the codec that `compression="fast"` is."""
    configuration = {"cname": "lz4", "clevel": 1, "shuffle": "bitshuffle", "blocksize": 0}
    return {"name": "blosc", "configuration": configuration | {"typesize": itemsize}}
