"""Saving and loading by path: the shortest way in and out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from dcp_zarr import tensors
from dcp_zarr.containers.by_path import is_hdf5, place_of
from dcp_zarr.errors import DcpZarrError, OptionError
from dcp_zarr.layout_rules import READ_CHUNK_BYTES, WRITE_CHUNK_BYTES
from dcp_zarr.opening import open_checkpoint
from dcp_zarr.planners import LoadReport, SafeLoadPlanner
from dcp_zarr.reader import HDF5StorageReader, ZarrStorageReader
from dcp_zarr.tasks import MEMORY_BUDGET_BYTES
from dcp_zarr.writer import HDF5StorageWriter, ZarrStorageWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcp_zarr.codecs import CompressionOption
    from dcp_zarr.containers.by_path import AnyPath
    from dcp_zarr.dcp_writer import DcpWriter
    from dcp_zarr.reader import DcpReader


def storage_writer(path: AnyPath, **options: Any) -> DcpWriter:  # noqa: ANN401
    """Return the writer for a path, by its suffix; options are those of the writer.

    Raises
    ------
    OptionError
        If no writer of this release makes what the suffix says.
    """
    _check_suffix(path)
    kind = HDF5StorageWriter if is_hdf5(place_of(path)) else ZarrStorageWriter
    return kind(path, **options)


def storage_reader(path: AnyPath, **options: Any) -> DcpReader:  # noqa: ANN401
    """Return the reader for a path, by its suffix; options are those of the reader.

    Raises
    ------
    OptionError
        If no reader of this release reads what the suffix says.
    """
    _check_suffix(path)
    kind = HDF5StorageReader if is_hdf5(place_of(path)) else ZarrStorageReader
    return kind(path, **options)


def _check_suffix(path: AnyPath) -> None:
    name = str(place_of(path))
    if name.lower().rstrip("/").endswith((".pt", ".safetensors")):
        raise OptionError(
            f"{name!r} has the suffix of another format; dcp_zarr saves Zarr stores and "
            "HDF5 files. Choose a path that ends in .zarr, .zarr.zip or .h5."
        )


def save(
    state_dict: dict[str, Any],
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    compression: CompressionOption | Literal["default"] = "default",
    overwrite: bool = True,
    thread_count: int | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    read_chunk_bytes: int = READ_CHUNK_BYTES,
    write_chunk_bytes: int = WRITE_CHUNK_BYTES,
    sync_files: bool = True,
    dtype_encoding: str = "native",
    statistics: bool = False,
    share_plain_tensors: bool = False,
    progress: bool = False,
) -> Metadata:
    """Save a state dict as one checkpoint. All ranks call it.

    Without a process group this process saves alone. A path that ends in ``.h5`` becomes an HDF5
    file, one that ends in ``.zip`` a zip file, any other a directory. Options are those of
    `ZarrStorageWriter` and `HDF5StorageWriter`; the default compression is ``"fast"`` in a Zarr
    store, and in HDF5 ``"small"``, which any HDF5 reader decodes.

    Examples
    --------
    >>> import torch
    >>> _ = save({"w": torch.ones(4)}, "step-1.zarr")
    """
    hdf5 = is_hdf5(place_of(path))
    if not isinstance(state_dict, Mapping):
        raise OptionError(
            f"A state dict is saved, not a {type(state_dict).__name__}: give a dict, such as "
            '{"model": model.state_dict()}.'
        )
    if hdf5 and write_chunk_bytes != WRITE_CHUNK_BYTES:
        raise OptionError(
            "write_chunk_bytes is for Zarr stores: an HDF5 file holds read chunks one by one."
        )
    if compression == "default":
        compression = "small" if hdf5 else "fast"
    writer = storage_writer(
        path,
        compression=compression,
        overwrite=overwrite,
        thread_count=thread_count,
        memory_budget_bytes=memory_budget_bytes,
        read_chunk_bytes=read_chunk_bytes,
        sync_files=sync_files,
        dtype_encoding=dtype_encoding,
        statistics=statistics,
        share_plain_tensors=share_plain_tensors,
        progress=progress,
        **({} if hdf5 else {"write_chunk_bytes": write_chunk_bytes}),
    )
    with _own_errors():
        metadata: Metadata = dcp.save(
            state_dict,
            storage_writer=writer,
            process_group=process_group,
            no_dist=tensors.is_alone(),
        )
    return metadata


@contextmanager
def _own_errors(loaded: AnyPath | None = None) -> Iterator[None]:
    """Raise the first rank's own error where each rank's is ours; DCP's is no `Exception`.

    That there is no process group is what was asked for, and no reason for DCP's warning. Why a
    checkpoint that is to be loaded cannot be read, DCP keeps to itself.
    """
    try:
        with warnings.catch_warnings():
            if tensors.is_alone():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        ranks = sorted(error.failures)
        errors = [error.failures[rank][0] for rank in ranks]
        if not all(isinstance(own, DcpZarrError) for own in errors):
            if loaded is not None:
                open_checkpoint(loaded).close()
            raise
        errors[0].add_note(f"on rank {', '.join(map(str, ranks))}")
        raise errors[0] from None


def load(
    path: AnyPath,
    pattern: str = "",
    *,
    flat: bool = False,
    weights_only: bool = True,
    thread_count: int | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, or a part of it, into new CPU tensors. No model and no process group.

    FQNs stay whole, so ``load(path, "model")`` returns a dict with one key ``"model"``.

    Parameters
    ----------
    path
        The checkpoint.
    pattern
        Name or pattern of what to load; all by default. Nothing else is read.
    flat
        Return a flat dict by FQN rather than nested as it was saved.
    weights_only
        Refuse objects whose unpickling could run code. Turn off for checkpoints you trust.
    thread_count
        Worker threads; by default this process' share of the cores.

    Raises
    ------
    TensorNotFoundError
        If the pattern selects nothing.

    Examples
    --------
    >>> import torch
    >>> _ = save({"model": {"w": torch.ones(2)}, "step": 7}, "step-1.zarr")
    >>> load("step-1.zarr")
    {'model': {'w': tensor([1., 1.])}, 'step': 7}
    >>> load("step-1.zarr", "model", flat=True)
    {'model.w': tensor([1., 1.])}
    """
    with open_checkpoint(path) as checkpoint:
        return checkpoint.select(pattern).load(
            flat=flat, weights_only=weights_only, thread_count=thread_count
        )


def load_into(
    target: torch.nn.Module | MutableMapping[str, Any],
    path: AnyPath,
    prefix: str = "",
    *,
    strict: bool = True,
    allow_cast: bool = False,
    weights_only: bool = True,
    process_group: dist.ProcessGroup | None = None,
    thread_count: int | None = None,
    progress: bool = False,
) -> LoadReport:
    """Load a part of a checkpoint into a module or a state dict, in place. All ranks call it.

    Parameters
    ----------
    target
        A module, sharded or not, or a state dict whose tensors are filled.
    path
        The checkpoint.
    prefix
        Where in the checkpoint the target's entries stand, such as ``"model"``.
    strict
        Raise, before anything is changed, where names are missing or unexpected.
    allow_cast
        Whether values may be rounded into a narrower dtype.
    weights_only
        Refuse objects whose unpickling could run code.
    process_group
        Group whose ranks call this together; the default group if there is one.
    thread_count
        Worker threads; by default this process' share of the cores.
    progress
        Show on the coordinator how much of its part is loaded.

    Raises
    ------
    TensorNotFoundError
        If `strict`, and names are missing or unexpected.
    TensorMismatchError
        If an entry is of another kind or size.

    Examples
    --------
    >>> import torch
    >>> _ = save({"model": torch.nn.Linear(2, 1).state_dict()}, "step-1.zarr")
    >>> load_into(torch.nn.Linear(2, 1), "step-1.zarr", "model").loaded
    ('model.weight', 'model.bias')
    """
    is_module = isinstance(target, torch.nn.Module)
    if not is_module and not isinstance(target, MutableMapping):
        raise OptionError(
            f"A module or a state dict is loaded into, not a {type(target).__name__}: "
            "load_into(model, path)."
        )
    wanted = target.state_dict() if isinstance(target, torch.nn.Module) else target
    planner = SafeLoadPlanner(prefix, strict=strict, weights_only=weights_only)
    reader = storage_reader(
        path, allow_cast=allow_cast, thread_count=thread_count, progress=progress
    )
    state_dict: Any = {prefix: wanted} if prefix else wanted
    with _own_errors(path):
        dcp.load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=tensors.is_alone(),
        )
    if is_module and any(not isinstance(value, torch.Tensor) for value in wanted.values()):
        target.load_state_dict(wanted, strict=False)  # type: ignore[union-attr]
    return planner.report
