"""Which foreign format a file or directory is of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_zarr.containers.foreign import safetensors, torch_dcp, torch_files, torch_save

if TYPE_CHECKING:
    from dcp_zarr.containers.foreign.foreign_source import ForeignSource

FIRST_BYTES = 512
"""Of a file, by which it is known."""
_TORCH_ENTRIES = (b"/data.pkl", b"/data/0")
"""First entries of a file of ``torch.save``, and of TorchScript."""


def open_file(path: str, begins: bytes) -> ForeignSource | None:
    """Open a file of another format by its first bytes; None where it is of none.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If it is not whole, or holds what cannot be read.
    """
    if torch_files.is_older(begins) or is_torch_zip(begins):
        return torch_save.open_file(path)
    if safetensors.is_safetensors(begins) or path.endswith(".safetensors"):
        return safetensors.open_file(path)
    return None


def is_torch_zip(begins: bytes) -> bool:
    """Say whether a zip file's first entry is one that torch writes first."""
    name_nbytes = int.from_bytes(begins[26:28], "little")
    return begins.startswith(b"PK\3\4") and begins[30 : 30 + name_nbytes].endswith(_TORCH_ENTRIES)


def open_directory(path: str) -> ForeignSource | None:
    """Open a directory of another format by the names in it; None where it is of none.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If it is not whole, or holds what cannot be read.
    """
    names = os.listdir(path) if Path(path).is_dir() else []
    if "zarr.json" in names:
        return None
    if Path(path, torch_dcp.METADATA).is_file():
        return torch_dcp.open_directory(path)
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return safetensors.open_directory(path, names)
    return None
