"""Opening a checkpoint by its path. numpy is enough."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from dcp_zarr.checkpoint import Checkpoint
from dcp_zarr.containers.by_path import open_source, place_of
from dcp_zarr.errors import CheckpointNotFoundError, IncompleteCheckpointError

if TYPE_CHECKING:
    from dcp_zarr.containers.by_path import AnyPath


def open_checkpoint(path: AnyPath) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts. No process group, no torch.

    Only the schema is read.

    Parameters
    ----------
    path
        Path of what dcp_zarr saved: a ``.zarr`` directory, a zip file or an HDF5 file; the URL of
        an object store, ``s3://``, ``gs://``, ``az://`` or ``https://``; or a store itself. Or of
        what others did: a directory of torch's DCP, a file of ``torch.save``, a safetensors file or
        a directory of them; nothing in these is run, and they have no checksums.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    StoreError
        If an object store refuses or fails.
    UnsupportedTensorError
        If it holds a tensor of a dtype that torch does not have.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> _ = dcp_zarr.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, "step-1.zarr")
    >>> checkpoint = dcp_zarr.open_checkpoint("step-1.zarr")
    >>> checkpoint["model.w"][1]
    tensor([3., 4., 5.])
    """
    return Checkpoint(open_source(place_of(path)))


def opened(
    checkpoint: Checkpoint | AnyPath,
) -> AbstractContextManager[Checkpoint]:
    """Return a checkpoint for a while: one that is open stays open, one at a path is closed."""
    return (
        nullcontext(checkpoint)
        if isinstance(checkpoint, Checkpoint)
        else open_checkpoint(checkpoint)
    )


def is_complete(path: AnyPath) -> bool:
    """Say whether a committed checkpoint stands at a path; its values are not read.

    Raises
    ------
    CorruptionError, FormatError
        If something stands there that is no whole checkpoint of a version that can be read.

    Examples
    --------
    >>> is_complete("step-999.zarr")
    False
    """
    try:
        open_checkpoint(path).close()
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True
