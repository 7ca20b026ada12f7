"""Which container a path means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_zarr.containers.directory_source import DirectorySource
from dcp_zarr.containers.foreign import foreign_by_path
from dcp_zarr.containers.foreign.foreign_by_path import FIRST_BYTES
from dcp_zarr.containers.object_store import is_store, opened, store_at
from dcp_zarr.containers.zip_source import ZipSource
from dcp_zarr.disk_errors import opening
from dcp_zarr.errors import OptionError
from dcp_zarr.local_files import local_path

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import Store

    from dcp_zarr.container import Source, Target
    from dcp_zarr.containers.object_store import Place
    from dcp_zarr.placement import SaveOptions

    AnyPath = str | os.PathLike[str] | Store | ObjectStore

WRITE_CHUNK_BYTES = 8 << 20
"""Largest size, uncompressed, of an object in a zip file or store: what a worker takes at once."""
HDF5_READ_CHUNK_BYTES = 1 << 20
"""Largest size of a read chunk in an HDF5 file: what libhdf5 keeps, before version 2.0."""
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ZIP_SIGNATURE = b"PK"
_BUDGET_PARTS = 32
"""An object that waits to be whole is at most this fraction of the budget: one for a thread."""


def place_of(path: AnyPath) -> Place:
    """Return where a checkpoint is: a local path, a URL of an object store, or a store itself.

    Raises
    ------
    OptionError
        If it is neither.
    """
    return store_at(path) or local_path(path)  # type: ignore[arg-type]


def is_place(path: str | os.PathLike[str]) -> bool:
    """Say whether an id can be a path or an address of a checkpoint."""
    try:
        return bool(place_of(path))
    except OptionError:
        return False


def is_zip(path: Place) -> bool:
    """Say whether a path means a zip file, by its suffix; links are followed."""
    return os.path.realpath(str(path)).lower().endswith(".zip")


def is_hdf5(path: Place) -> bool:
    """Say whether a path means an HDF5 file, by its suffix; links are followed."""
    return os.path.realpath(str(path)).lower().endswith((".h5", ".hdf5"))


def allowed(
    options: SaveOptions, path: Place, *, hdf5: bool, memory_budget_bytes: int
) -> SaveOptions:
    """Return a save's options as far as the container follows them.

    In a zip file and in an object store an object is one piece, which its rank writes when it knows
    all of it: until then it is in memory. In an HDF5
    file read chunks are stored one by one, and codecs are HDF5's filters.
    """
    if not hdf5 and not is_zip(path) and not is_store(path):
        return options
    most = min(WRITE_CHUNK_BYTES, max(memory_budget_bytes // _BUDGET_PARTS, 1))
    write_chunk_bytes = min(options.layout.write_chunk_bytes, most)
    layout = replace(options.layout, shared_objects=False, write_chunk_bytes=write_chunk_bytes)
    if not hdf5:
        return replace(options, layout=layout)
    return replace(
        options,
        layout=replace(layout, most_read_chunk_bytes=HDF5_READ_CHUNK_BYTES),
        compression=replace(options.compression, filters=True),
        own_object_arrays=False,
    )


def open_source(path: Place) -> Source:
    """Open the checkpoint at a path: a file by its first bytes, all else as a directory.

    What torch or safetensors saved is opened too.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    DcpZarrError
        If the file system refuses.
    """
    if is_store(path):
        _check_kind(path)
        from dcp_zarr.containers.object_store_source import ObjectStoreSource  # noqa: PLC0415

        return ObjectStoreSource(path)
    with opening(str(path)):
        return _open_local(str(path))


def _open_local(path: str) -> Source:
    found = Path(path)
    is_there, is_file = found.exists(), found.is_file()  # asked once: a save may commit meanwhile
    if is_there and not is_file:
        return foreign_by_path.open_directory(path) or DirectorySource(path)
    begins = _first_bytes(found) if is_file else b""
    if (foreign := foreign_by_path.open_file(path, begins)) is not None:
        return foreign
    hdf5 = begins.startswith(_HDF5_SIGNATURE)
    if hdf5 or (is_hdf5(path) and not begins.startswith(_ZIP_SIGNATURE)):
        from dcp_zarr.containers.hdf5_source import HDF5Source  # noqa: PLC0415  h5py takes long

        return HDF5Source(path)
    return ZipSource(path) if is_zip(path) or is_file else DirectorySource(path)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FIRST_BYTES)


def _check_kind(path: Place, *, hdf5: bool = False) -> None:
    if hdf5 or (isinstance(path, str) and (is_hdf5(path) or is_zip(path))):
        raise OptionError(
            f"{path!r}: in an object store a checkpoint is a Zarr store, with an object for each "
            "part. Give an address that ends in .zarr, or keep the file on a file system.",
            path=str(path),
        )


def new_target(path: Place, *, hdf5: bool, overwrite: bool, sync: bool) -> Target:
    """Return the container to be at a path: an HDF5 file, or a Zarr store, by the suffix."""
    if is_store(path):
        _check_kind(path, hdf5=hdf5)
        from dcp_zarr.containers.object_store_target import ObjectStoreTarget  # noqa: PLC0415

        return ObjectStoreTarget(opened(path), overwrite=overwrite)
    path = str(path)
    if hdf5:
        from dcp_zarr.containers.hdf5_target import HDF5Target  # noqa: PLC0415  h5py takes long

        return HDF5Target(path, overwrite=overwrite, sync=sync)
    # A look at a checkpoint needs none of what writes one.
    from dcp_zarr.containers.directory_target import DirectoryTarget  # noqa: PLC0415
    from dcp_zarr.containers.zip_target import ZipTarget  # noqa: PLC0415

    kind = ZipTarget if is_zip(path) else DirectoryTarget
    return kind(path, overwrite=overwrite, sync=sync)
