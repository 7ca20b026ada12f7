"""Opening a checkpoint: names, shapes and slices. numpy is enough; torch comes in on request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import display, engine, names
from dcp_zarr.containers.directory import DirectorySource
from dcp_zarr.errors import OptionError
from dcp_zarr.region import Region

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry, TensorEntry


def read_object(source: Source, entry: ObjectEntry) -> bytes:
    """Return the bytes of an object that is stored as bytes."""
    assert entry.array is not None  # noqa: S101
    out = np.empty(entry.nbytes, np.uint8)
    region = Region((entry.offset,), (entry.nbytes,))
    job = engine.ReadJob(entry.array, source.schema.objects_codec, region, out)
    list(engine.read([job], source, thread_count=1))
    return out.tobytes()
