"""DCP's `Metadata`, plans and results in the core's words, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_zarr import tensors
from dcp_zarr.coordinator import Description, Written
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import LayoutError, SaveError, UnsupportedTensorError
from dcp_zarr.garbage import no_collection
from dcp_zarr.placement import SaveOptions, TensorPlan
from dcp_zarr.region import Region, Tiling
from dcp_zarr.schema import ObjectEntry, Schema, TensorEntry
from dcp_zarr.schema_json import MAX_LIST

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

MAX_PUBLISHED_REGIONS = 100_000
"""Most regions of all tensors that a load is planned by."""

_DEFAULT_PROPERTIES = {
    "layout": "strided",
    "requires_grad": False,
    "memory_format": "contiguous_format",
    "pin_memory": False,
}


def region(item: WriteItem) -> Region:
    """Return the region that a tensor's write item covers."""
    assert item.tensor_data is not None  # noqa: S101
    box = item.tensor_data.chunk
    return Region(tuple(box.offsets), tuple(box.sizes))


def tensor_plans(
    plans: Sequence[SavePlan], options: SaveOptions
) -> tuple[dict[str, TensorPlan], list[str]]:
    """Return what the plans of all ranks say of tensors, and the names of objects."""
    items: dict[str, list[WriteItem]] = {}
    objects = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                objects.append(item.index.fqn)
                continue
            of_tensor = items.setdefault(item.index.fqn, [])
            of_tensor.append(item)
            _check_agrees(item, of_tensor[0], rank)
    planned = {}
    for fqn, of_tensor in items.items():
        first = of_tensor[0].tensor_data
        assert first is not None  # noqa: S101
        boxes = [item.tensor_data.chunk for item in of_tensor if item.tensor_data is not None]
        planned[fqn] = _tensor_plan(fqn, first.properties, _tiling(first.size, boxes), options)
    return planned, objects


def _tiling(size: torch.Size, boxes: Sequence[ChunkStorageMetadata]) -> Tiling:
    """Return DCP's boxes as a tiling; there may be millions."""
    shape = (len(boxes), len(size))
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(shape)
    sizes = np.array([box.sizes for box in boxes], np.int64).reshape(shape)
    return Tiling(tuple(size), offsets, sizes)


def _check_agrees(item: WriteItem, first: WriteItem, rank: int) -> None:
    """Raise where ranks disagree on what a tensor is."""
    found, expected = item.tensor_data, first.tensor_data
    assert found is not None  # noqa: S101
    assert expected is not None  # noqa: S101
    if (found.size, found.properties.dtype) != (expected.size, expected.properties.dtype):
        raise LayoutError(
            f"Ranks disagree on tensor {item.index.fqn!r}: rank {rank} saves a part of "
            f"{found.properties.dtype} {tuple(found.size)}, another rank one of "
            f"{expected.properties.dtype} {tuple(expected.size)}.",
            fqn=item.index.fqn,
            rank=rank,
        )


def planned_tensors(metadata: Metadata, options: SaveOptions) -> dict[str, TensorPlan]:
    """Return what the finished `Metadata` says of tensors."""
    planned = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tiling = _tiling(entry.size, entry.chunks)
            planned[fqn] = _tensor_plan(fqn, entry.properties, tiling, options)
    return planned


def _tensor_plan(
    fqn: str, properties: TensorProperties, tiling: Tiling, options: SaveOptions
) -> TensorPlan:
    described = {
        "layout": tensors.torch_name(properties.layout),
        "requires_grad": properties.requires_grad,
        "memory_format": tensors.torch_name(properties.memory_format),
        "pin_memory": properties.pin_memory,
    }
    if described["layout"] != "strided":
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} has layout {properties.layout}; use to_dense(), or drop it.",
            fqn=fqn,
        )
    name = tensors.torch_name(properties.dtype)
    dtype = dtype_of(name, encoding=options.dtype_encoding, fqn=fqn)
    changed = {key: v for key, v in described.items() if v != _DEFAULT_PROPERTIES[key]}
    return TensorPlan(dtype, tiling, changed)


def written(results: Sequence[Sequence[WriteResult]]) -> list[list[Written]]:
    """Return what the ranks report."""
    return [[_written(result) for result in of_rank] for of_rank in results]


def _written(result: WriteResult) -> Written:
    fqn, offset = result.index.fqn, result.index.offset
    fingerprint, sizes = result.storage_data
    box = None if sizes is None else Region(tuple(offset or ()), sizes)
    return Written(fqn, box, result.size_in_bytes, fingerprint)


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
    described = {**_DEFAULT_PROPERTIES, **entry.properties}
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
