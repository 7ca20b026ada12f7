"""Which container a path means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_zarr.containers.directory_source import DirectorySource
from dcp_zarr.containers.directory_target import DirectoryTarget
from dcp_zarr.containers.zip_source import ZipSource
from dcp_zarr.containers.zip_target import ZipTarget

if TYPE_CHECKING:
    from dcp_zarr.container import Source, Target
    from dcp_zarr.layout_rules import LayoutOptions

ZIP_WRITE_CHUNK_BYTES = 8 << 20
"""Largest size of an object in a zip file, uncompressed: what a worker takes at once."""


def is_zip(path: str) -> bool:
    """Say whether a path means a zip file, by its suffix; links are followed."""
    return os.path.realpath(path).lower().endswith(".zip")


def allowed(layout: LayoutOptions, path: str) -> LayoutOptions:
    """Return the options for layouts as far as the container at a path follows them.

    In a zip file an object is one piece, which its rank writes when it knows all of it.
    """
    if not is_zip(path):
        return layout
    write_chunk_bytes = min(layout.write_chunk_bytes, ZIP_WRITE_CHUNK_BYTES)
    return replace(layout, shared_objects=False, write_chunk_bytes=write_chunk_bytes)


def open_source(path: str) -> Source:
    """Open the checkpoint at a path: a file as a zip file, all else as a directory.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    """
    found = Path(path)
    packed = found.is_file() or (is_zip(path) and not found.exists())
    return ZipSource(path) if packed else DirectorySource(path)


def new_target(path: str, *, overwrite: bool, sync: bool) -> Target:
    """Return the container to be at a path, by its suffix."""
    kind = ZipTarget if is_zip(path) else DirectoryTarget
    return kind(path, overwrite=overwrite, sync=sync)
