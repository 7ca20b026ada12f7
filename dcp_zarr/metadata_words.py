"""DCP's `Metadata`, plans and results in the core's words, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_zarr import tensors
from dcp_zarr.coordinator import Description
from dcp_zarr.errors import SaveError
from dcp_zarr.garbage import no_collection
from dcp_zarr.region import Region
from dcp_zarr.schema import ObjectEntry, Schema, TensorEntry
from dcp_zarr.schema_json import MAX_LIST

MAX_PUBLISHED_REGIONS = 100_000
"""Most regions of all tensors that a load is planned by."""

DEFAULT_PROPERTIES = {
    "layout": "strided",
    "requires_grad": False,
    "memory_format": "contiguous_format",
    "pin_memory": False,
}


def description(metadata: Metadata, save_id: str) -> Description:
    """Return the rest of what a schema holds.

    Raises
    ------
    SaveError
        If the planner's data cannot be stored without pickle.
    """
    planner_data = metadata.planner_data
    flat = planner_data is None or (
        isinstance(planner_data, dict) and all(_is_path(keys) for keys in planner_data.values())
    )
    if not flat:
        raise SaveError(
            f"The planner's planner_data is {planner_data!r:.80}; only DefaultSavePlanner's, from "
            "FQNs to tuples of keys, can be stored without pickle."
        )
    assert metadata.storage_meta is not None  # noqa: S101
    return Description(
        save_id=save_id,
        planner_data=planner_data,
        storage_meta=dataclasses.asdict(metadata.storage_meta),
        metadata_version=getattr(metadata, "version", None),
        producer={"dcp_zarr": version("dcp_zarr"), "torch": str(torch.__version__)},
    )


def _is_path(keys: Any) -> bool:  # noqa: ANN401
    return isinstance(keys, tuple) and all(
        type(key) is str or (type(key) is int and 0 <= key < MAX_LIST) for key in keys
    )


@no_collection()
def metadata_from(schema: Schema) -> Metadata:
    """Return the `Metadata` that `dcp.save` returned for a checkpoint.

    Above `MAX_PUBLISHED_REGIONS` each tensor is told as one region: what DCP plans a load by it
    compares with every region, on every rank.
    """
    count = sum(len(entry.tiling) for entry in schema.tensors.values())
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in schema.entries:
        if isinstance(entry, ObjectEntry):
            described[entry.fqn] = BytesStorageMetadata()
        else:
            described[entry.fqn] = _tensor_metadata(entry, whole=count > MAX_PUBLISHED_REGIONS)
    metadata = Metadata(
        state_dict_metadata=described,
        planner_data=schema.planner_data,
        storage_meta=None if schema.storage_meta is None else _storage_meta(schema.storage_meta),
    )
    if schema.metadata_version is not None:
        metadata.version = schema.metadata_version
    return metadata


def _storage_meta(described: Mapping[str, Any]) -> StorageMeta:
    """Return DCP's object; fields that the installed torch does not know are left out."""
    known = {field.name for field in dataclasses.fields(StorageMeta)}
    return StorageMeta(**{key: value for key, value in described.items() if key in known})


def _tensor_metadata(entry: TensorEntry, *, whole: bool) -> TensorStorageMetadata:
    described = {**DEFAULT_PROPERTIES, **entry.properties}
    properties = TensorProperties(
        dtype=tensors.torch_dtype(entry.dtype.torch_name),
        layout=getattr(torch, described["layout"]),
        requires_grad=described["requires_grad"],
        memory_format=getattr(torch, described["memory_format"]),
        pin_memory=described["pin_memory"],
    )
    regions = [Region.whole(entry.array.shape)] if whole else entry.tiling
    boxes = [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in regions
    ]
    return TensorStorageMetadata(properties, torch.Size(entry.array.shape), boxes)
