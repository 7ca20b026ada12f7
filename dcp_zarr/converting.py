"""`convert` and `repack`: a checkpoint in another format, or stored anew. Torch on request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from dcp_zarr.conversion import Conversion, ConversionReport, StoredHow
from dcp_zarr.destinations import OURS, Destination, format_of
from dcp_zarr.errors import OptionError
from dcp_zarr.local_files import local_path
from dcp_zarr.opening import opened
from dcp_zarr.tasks import MEMORY_BUDGET_BYTES, Limits, check_count

if TYPE_CHECKING:
    from dcp_zarr.checkpoint import Checkpoint
    from dcp_zarr.codecs import CompressionOption


def convert(
    checkpoint: Checkpoint | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    pattern: str = "",
    *,
    to: str | None = None,
    compression: CompressionOption | Literal["keep"] = "keep",
    read_chunk_bytes: int | None = None,
    allow_loss: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    thread_count: int | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint in another format, bit for bit; names, nesting and regions are kept.

    Tensors are streamed, in bounded memory. The result is compared with the source, and then
    appears in one act: a conversion that fails or is killed leaves what stood there. It begins anew
    when it is called again: to trust what a dead one left would take reading all of it twice.

    Nothing in a pickle is run. As in DCP, keys of dicts become text, and tuples that hold tensors
    lists. safetensors knows names and tensors alone, ``torch.save`` no regions.

    Parameters
    ----------
    checkpoint
        The checkpoint, in any format that `open_checkpoint` opens, or its path.
    destination
        Where it goes. Its suffix tells the format: ``.zarr``, ``.zarr.zip``, ``.h5``, ``.pt``,
        ``.pth`` or ``.bin`` (of ``torch.save``), ``.safetensors``.
    pattern
        Name or pattern of what to convert; all by default.
    to
        The format, where no suffix tells: ``"dcp"`` for a directory of torch's own DCP,
        ``"safetensors-directory"``; or ``"zarr"``, ``"zarr-zip"``, ``"hdf5"``, ``"torch"``,
        ``"safetensors"``.
    compression
        In a container of ours; as of `save`. ``"keep"`` leaves tensors as they are compressed
        where source and destination are both Zarr stores, or both HDF5 files; all else gets the
        default of `save`.
    read_chunk_bytes
        Wanted size of read chunks in a container of ours. By default, those of another container
        of ours stay as they are.
    allow_loss
        Leave out what the format cannot hold; the report names it.
    overwrite
        Whether to replace a checkpoint of the same format.
    verify
        Whether to read all tensors of both, and compare them.
    thread_count
        Worker threads; by default this process' share of the cores.
    memory_budget_bytes
        Memory for values and encoded bytes under way; two read chunks a thread at least.
    progress
        Called in this thread with the bytes written and compared so far, and with those of all.

    Raises
    ------
    UnsupportedTensorError
        If the format cannot hold something, unless `allow_loss`.
    OptionError
        If the format is not known, or an option cannot be used.
    CheckpointExistsError
        If something stands at the destination that must not be replaced.
    CorruptionError
        If stored bytes are lost or changed, or the two differ in the end.
    SaveError
        If it cannot be written, such as on a full disk.

    Examples
    --------
    >>> import torch
    >>> torch.save({"model": {"w": torch.ones(4)}, "step": 7}, "model.pt")
    >>> convert("model.pt", "model.zarr")
    ConversionReport: 1 tensors and 1 objects in 'model.zarr' (zarr), left out: 0
    >>> convert("model.zarr", "dcp", to="dcp")
    ConversionReport: 1 tensors and 1 objects in 'dcp' (dcp), left out: 0
    """
    limits = _limits(thread_count, memory_budget_bytes)
    destined = Destination.of(local_path(destination), to)
    how = StoredHow.of(compression, read_chunk_bytes)
    if destined.format not in OURS and how != StoredHow.of("keep", None):
        raise OptionError(
            f"compression and read_chunk_bytes are for containers of ours, and {destined.path!r} "
            f"is to be of format {destined.format!r}."
        )
    with opened(checkpoint) as whole:
        chosen = whole.select(pattern)
        destined.check(overwrite=overwrite)
        conversion = Conversion(chosen._source, chosen._schema, destined, how, limits)
        return conversion.run(progress, allow_loss=allow_loss, verify=verify)


def repack(
    path: str | os.PathLike[str],
    *,
    keep: str = "",
    compression: CompressionOption | Literal["keep"] = "keep",
    read_chunk_bytes: int | None = None,
    verify: bool = True,
    thread_count: int | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Store a checkpoint of ours anew, in its place: `convert` to where it stands.

    Parameters
    ----------
    path
        The checkpoint: a Zarr store, a zip file or an HDF5 file.
    keep
        Name or pattern of what stays; all else is dropped. Such as ``"model"``.
    compression, read_chunk_bytes, verify, thread_count, memory_budget_bytes, progress
        As of `convert`.

    Raises
    ------
    OptionError
        If it is no checkpoint of ours; use `convert`.
    CheckpointNotFoundError, TensorNotFoundError, CorruptionError, SaveError
        If there is none, `keep` selects nothing, it is damaged, or it cannot be written.

    Examples
    --------
    >>> import torch
    >>> _ = save({"model": torch.ones(4), "optimizer": torch.ones(8)}, "step-1.zarr")
    >>> repack("step-1.zarr", keep="model", compression="small")
    ConversionReport: 1 tensors and 0 objects in 'step-1.zarr' (zarr), left out: 0
    """
    with opened(path) as whole:
        found = format_of(Destination.of(local_path(path), "zarr").commit.path)
        if found not in OURS:
            raise OptionError(
                f"{whole.path!r} is no checkpoint of dcp_zarr, and stays as it is; convert() "
                "writes it to another path."
            )
        return convert(
            whole,
            path,
            keep,
            to=found,
            compression=compression,
            read_chunk_bytes=read_chunk_bytes,
            overwrite=True,
            verify=verify,
            thread_count=thread_count,
            memory_budget_bytes=memory_budget_bytes,
            progress=progress,
        )


def _limits(thread_count: int | None, memory_budget_bytes: int) -> Limits:
    check_count("memory_budget_bytes", memory_budget_bytes)
    return Limits.of(thread_count, memory_budget_bytes)
