"""Distributed PyTorch checkpoints as Zarr v3 stores or HDF5 files that any array reader opens.

Names load when they are first used: ``import dcp_zarr`` and `open_checkpoint` import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_zarr.api import load, load_into, save, storage_reader, storage_writer
    from dcp_zarr.checkpoint import Checkpoint
    from dcp_zarr.checkpoint_series import CheckpointSeries, TracePoint, series
    from dcp_zarr.comparison import TensorDifference
    from dcp_zarr.conversion import ConversionReport
    from dcp_zarr.converting import convert, repack
    from dcp_zarr.default_storage import as_default
    from dcp_zarr.errors import (
        CheckpointExistsError,
        CheckpointNotFoundError,
        CorruptionError,
        DcpZarrError,
        FormatError,
        IncompleteCheckpointError,
        LayoutError,
        OptionError,
        SaveError,
        StoreError,
        TensorMismatchError,
        TensorNotFoundError,
        UnsafeObjectError,
        UnsupportedTensorError,
    )
    from dcp_zarr.histogram import Histogram
    from dcp_zarr.lazy_tensor import LazyTensor
    from dcp_zarr.opening import is_complete, open_checkpoint
    from dcp_zarr.pictures.picture import Picture
    from dcp_zarr.planners import LoadReport, SafeLoadPlanner
    from dcp_zarr.reader import HDF5StorageReader, ZarrStorageReader
    from dcp_zarr.region import Region
    from dcp_zarr.reporting import report
    from dcp_zarr.run_folder import checkpoints, latest
    from dcp_zarr.safetensors_export import ExportReport, export
    from dcp_zarr.spectrum import Spectrum
    from dcp_zarr.table import Table
    from dcp_zarr.tensor_statistics import TensorStatistics
    from dcp_zarr.totals import Total
    from dcp_zarr.verification import Damage
    from dcp_zarr.writer import HDF5StorageWriter, ZarrStorageWriter

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointSeries",
    "ConversionReport",
    "CorruptionError",
    "Damage",
    "DcpZarrError",
    "ExportReport",
    "FormatError",
    "HDF5StorageReader",
    "HDF5StorageWriter",
    "Histogram",
    "IncompleteCheckpointError",
    "LayoutError",
    "LazyTensor",
    "LoadReport",
    "OptionError",
    "Picture",
    "Region",
    "SafeLoadPlanner",
    "SaveError",
    "Spectrum",
    "StoreError",
    "Table",
    "TensorDifference",
    "TensorMismatchError",
    "TensorNotFoundError",
    "TensorStatistics",
    "Total",
    "TracePoint",
    "UnsafeObjectError",
    "UnsupportedTensorError",
    "ZarrStorageReader",
    "ZarrStorageWriter",
    "as_default",
    "checkpoints",
    "convert",
    "export",
    "is_complete",
    "latest",
    "load",
    "load_into",
    "open_checkpoint",
    "repack",
    "report",
    "save",
    "series",
    "storage_reader",
    "storage_writer",
]

_MODULES = {
    "api": ("load", "load_into", "save", "storage_reader", "storage_writer"),
    "checkpoint": ("Checkpoint",),
    "checkpoint_series": ("CheckpointSeries", "TracePoint", "series"),
    "comparison": ("TensorDifference",),
    "conversion": ("ConversionReport",),
    "converting": ("convert", "repack"),
    "default_storage": ("as_default",),
    "histogram": ("Histogram",),
    "lazy_tensor": ("LazyTensor",),
    "opening": ("is_complete", "open_checkpoint"),
    "pictures.picture": ("Picture",),
    "planners": ("LoadReport", "SafeLoadPlanner"),
    "reader": ("HDF5StorageReader", "ZarrStorageReader"),
    "region": ("Region",),
    "run_folder": ("checkpoints", "latest"),
    "safetensors_export": ("ExportReport", "export"),
    "spectrum": ("Spectrum",),
    "reporting": ("report",),
    "table": ("Table",),
    "tensor_statistics": ("TensorStatistics",),
    "totals": ("Total",),
    "verification": ("Damage",),
    "writer": ("HDF5StorageWriter", "ZarrStorageWriter"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the module of a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dcp_zarr.{_MODULE_OF.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
