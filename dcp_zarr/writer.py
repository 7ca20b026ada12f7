"""`ZarrStorageWriter` and `HDF5StorageWriter`: where a checkpoint goes, and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_zarr.dcp_writer import DcpWriter
from dcp_zarr.layout_rules import READ_CHUNK_BYTES, WRITE_CHUNK_BYTES
from dcp_zarr.tasks import MEMORY_BUDGET_BYTES

if TYPE_CHECKING:
    from dcp_zarr.codecs import CompressionOption
    from dcp_zarr.containers.by_path import AnyPath


class ZarrStorageWriter(DcpWriter):
    """Saves a checkpoint as a Zarr v3 store.

    Parameters
    ----------
    path
        Where the checkpoint shall stand, on a file system that all ranks share: a directory, or
        one zip file where it ends in ``.zip``. Or the URL of an object store (``s3://``, ``gs://``,
        ``az://``), or a store of obstore or zarr itself. May be left out where `dcp.save` is given
        a ``checkpoint_id``.
    compression
        ``"fast"``, ``"small"``, None, a numcodecs Blosc, Zstd or GZip, or a mapping from FQN
        patterns to those; the first pattern that matches holds.
    overwrite
        Whether a dcp_zarr checkpoint at the path may be replaced. Anything else never is. In an
        object store it is deleted first.
    thread_count
        Worker threads of this rank; by default its share of the cores, and 15 with an object store.
    memory_budget_bytes
        Memory for values and encoded bytes under way on this rank, beyond the state itself.
    read_chunk_bytes
        Wanted size of the smallest part that can be read alone, uncompressed.
    write_chunk_bytes
        Largest size of one stored object, uncompressed. An object that ranks share may be larger;
        one in a zip file or store is at most 8 MiB, and at most a thirty-second of the memory
        budget.
    sync_files
        Make everything durable (fsync) before the checkpoint becomes visible.
    dtype_encoding
        ``"native"``; or ``"bits"`` to store bfloat16 and float8 as unsigned integers, which
        readers without dcp_zarr can list.
    statistics
        Store with each tensor what its values are like, so that `Checkpoint.stats` reads none. The
        save then looks at every value, which costs time: the README has figures.
    share_plain_tensors
        Let each rank that holds a large plain tensor write a share of it. Only where the tensors of
        all ranks are equal, as with DDP. Large DTensor replicas are always shared out.
    progress
        Show on the coordinator, where standard error is a terminal, how much of its part is saved.

    Raises
    ------
    OptionError
        If an option has a value that cannot be used.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> writer = ZarrStorageWriter("step-1.zarr", compression="small")
    >>> _ = dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    """

    _hdf5 = False

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        compression: CompressionOption = "fast",
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
    ) -> None:
        super().__init__(
            path,
            compression=compression,
            overwrite=overwrite,
            thread_count=thread_count,
            memory_budget_bytes=memory_budget_bytes,
            read_chunk_bytes=read_chunk_bytes,
            write_chunk_bytes=write_chunk_bytes,
            sync_files=sync_files,
            dtype_encoding=dtype_encoding,
            statistics=statistics,
            share_plain_tensors=share_plain_tensors,
            progress=progress,
        )


class HDF5StorageWriter(DcpWriter):
    """Saves a checkpoint as one HDF5 file, which all ranks write at once.

    Parameters
    ----------
    path
        Where the file shall stand, on a file system that all ranks share. May be left out where
        `dcp.save` is given a ``checkpoint_id``.
    compression
        ``"small"``, shuffle and gzip, which any HDF5 reader decodes; ``"fast"``, Blosc LZ4, for
        readers with hdf5plugin; None; a numcodecs GZip, Blosc or Zstd; or a mapping from FQN
        patterns to those, of which the first that matches holds.
    overwrite
        Whether a dcp_zarr checkpoint at the path may be replaced. Anything else never is.
    thread_count
        Worker threads of this rank; by default its share of the cores.
    memory_budget_bytes
        Memory for values and encoded bytes under way on this rank, beyond the state itself.
    read_chunk_bytes
        Wanted size of an HDF5 chunk, uncompressed, and the largest one unless that is under 1 MiB.
    sync_files
        Make everything durable (fsync) before the checkpoint becomes visible.
    dtype_encoding
        ``"native"``; or ``"bits"`` to store bfloat16 and float8 as unsigned integers.
    statistics
        Store with each tensor what its values are like, so that `Checkpoint.stats` reads none. The
        save then looks at every value, which costs time: the README has figures.
    share_plain_tensors
        Let each rank that holds a large plain tensor write a share of it. Only where the tensors of
        all ranks are equal, as with DDP. Large DTensor replicas are always shared out.
    progress
        Show on the coordinator, where standard error is a terminal, how much of its part is saved.

    Raises
    ------
    OptionError
        If an option has a value that cannot be used.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> writer = HDF5StorageWriter("step-1.h5")
    >>> _ = dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    >>> import h5py
    >>> h5py.File("step-1.h5")["w"][:]
    array([1., 1., 1., 1.], dtype=float32)
    """

    _hdf5 = True

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        compression: CompressionOption = "small",
        overwrite: bool = True,
        thread_count: int | None = None,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
        read_chunk_bytes: int = READ_CHUNK_BYTES,
        sync_files: bool = True,
        dtype_encoding: str = "native",
        statistics: bool = False,
        share_plain_tensors: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(
            path,
            compression=compression,
            overwrite=overwrite,
            thread_count=thread_count,
            memory_budget_bytes=memory_budget_bytes,
            read_chunk_bytes=read_chunk_bytes,
            write_chunk_bytes=WRITE_CHUNK_BYTES,
            sync_files=sync_files,
            dtype_encoding=dtype_encoding,
            statistics=statistics,
            share_plain_tensors=share_plain_tensors,
            progress=progress,
        )
