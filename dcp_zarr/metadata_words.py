"""DCP's `Metadata`, plans and results in the core's words, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from dcp_zarr import tensors
from dcp_zarr.coordinator import Description
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import LayoutError, SaveError, UnsupportedTensorError
from dcp_zarr.garbage import no_collection
from dcp_zarr.parts import Parts, RankParts, by_tensor
from dcp_zarr.placement import SaveOptions, TensorPlan
from dcp_zarr.region import Region, Shape, Tiling
from dcp_zarr.results import RankResult
from dcp_zarr.schema import ObjectEntry, Schema, TensorEntry
from dcp_zarr.schema_json import MAX_LIST

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.storage import WriteResult

_Known = dict[tuple[Shape, bytes, bytes], Tiling]
_FQN = attrgetter("index.fqn")
_DESCRIBED = attrgetter("tensor_data")
_SIZE = attrgetter("size")
_DTYPE = attrgetter("properties.dtype")
_OFFSETS = attrgetter("chunk.offsets")
_SIZES = attrgetter("chunk.sizes")
_BOX_OFFSETS = attrgetter("offsets")
_BOX_SIZES = attrgetter("sizes")
_STORED = attrgetter("storage_data")
_NBYTES = attrgetter("size_in_bytes")
_INDEX_OFFSET = attrgetter("index.offset")

MAX_PUBLISHED_REGIONS = 100_000
"""Most regions of all tensors that a load is planned by."""

_DEFAULT_PROPERTIES = {
    "layout": "strided",
    "requires_grad": False,
    "memory_format": "contiguous_format",
    "pin_memory": False,
}


def rank_parts(items: Sequence[WriteItem]) -> RankParts:
    """Return the parts of tensors that a rank's write items are."""
    return _parts(*_tensor_items(items))


def _parts(fqns: Sequence[str], described: Sequence[TensorWriteData]) -> RankParts:
    return RankParts.of(fqns, map(_OFFSETS, described), [*map(_SIZES, described)])


def _tensor_items(items: Sequence[WriteItem]) -> tuple[list[str], list[TensorWriteData]]:
    """Return FQN and description of each item that is no object."""
    described = [*map(_DESCRIBED, items)]
    if not all(described):
        items = [item for item in items if item.tensor_data is not None]
        described = [*map(_DESCRIBED, items)]
    return [*map(_FQN, items)], described


def tensor_plans(
    plans: Sequence[SavePlan], options: SaveOptions
) -> tuple[dict[str, TensorPlan], list[str], dict[str, Parts]]:
    """Return what the plans of all ranks say of tensors, the names of objects, and all parts."""
    first: dict[str, TensorWriteData] = {}
    objects: list[str] = []
    ranks: list[RankParts] = []
    expected: list[list[Any]] = []
    for rank, plan in enumerate(plans):
        fqns, described = _tensor_items(plan.items)
        if not ranks or ranks[-1].fqns != fqns:  # most ranks have parts of the same tensors
            of_first = [*map(first.setdefault, fqns, described)]
            expected = [[*map(tells, of_first)] for tells in (_SIZE, _DTYPE)]
        if [[*map(tells, described)] for tells in (_SIZE, _DTYPE)] != expected:
            _refuse_difference(rank, fqns, described, first)
        ranks.append(_parts(fqns, described))
        if len(fqns) < len(plan.items):
            objects += [item.index.fqn for item in plan.items if item.tensor_data is None]
    planned: dict[str, TensorPlan] = {}
    known: _Known = {}
    parts = by_tensor(ranks)
    for fqn, of_tensor in parts.items():
        tiling = _tiling(known, first[fqn].size, of_tensor.offsets, of_tensor.sizes)
        planned[fqn] = _tensor_plan(fqn, first[fqn].properties, tiling, options)
    return planned, objects, parts


def _refuse_difference(
    rank: int,
    fqns: Sequence[str],
    described: Sequence[TensorWriteData],
    first: Mapping[str, TensorWriteData],
) -> None:
    """Raise where ranks disagree on what a tensor is."""
    for fqn, found in zip(fqns, described, strict=True):
        other = first[fqn]
        if (found.size, found.properties.dtype) != (other.size, other.properties.dtype):
            raise LayoutError(
                f"Ranks disagree on tensor {fqn!r}: rank {rank} saves a part of "
                f"{found.properties.dtype} {tuple(found.size)}, another rank one of "
                f"{other.properties.dtype} {tuple(other.size)}.",
                fqn=fqn,
                rank=rank,
            )


def planned_tensors(metadata: Metadata, options: SaveOptions) -> dict[str, TensorPlan]:
    """Return what the finished `Metadata` says of tensors."""
    planned: dict[str, TensorPlan] = {}
    known: _Known = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shape = len(entry.chunks), len(entry.size)
            offsets, sizes = (
                np.fromiter(chain.from_iterable(map(numbers, entry.chunks)), np.int64)
                for numbers in (_BOX_OFFSETS, _BOX_SIZES)
            )
            tiling = _tiling(known, entry.size, offsets.reshape(shape), sizes.reshape(shape))
            planned[fqn] = _tensor_plan(fqn, entry.properties, tiling, options)
    return planned


def _tiling(
    known: _Known, size: torch.Size, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Tiling:
    """Return a tiling; one value for all tensors that are placed alike."""
    shape = tuple(size)
    key = shape, offsets.tobytes(), sizes.tobytes()
    return known.setdefault(key, Tiling(shape, offsets, sizes))


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


def written(results: Sequence[WriteResult]) -> RankResult:
    """Return what a rank reports."""
    stored = [*map(_STORED, results)]
    objects = {
        number: (results[number].index.fqn, fingerprint)
        for number, (fingerprint, sizes) in enumerate(stored)
        if sizes is None
    }
    if objects:
        results = [result for n, result in enumerate(results) if n not in objects]
        stored = [*map(_STORED, results)]
    sizes = [of_part for _, of_part in stored]
    # Planners that know no offset save a tensor whole.
    offsets = [
        offset or (0,) * len(of_part)
        for offset, of_part in zip(map(_INDEX_OFFSET, results), sizes, strict=True)
    ]
    return RankResult(
        RankParts.of([*map(_FQN, results)], offsets, sizes),
        np.array([*map(_NBYTES, results)], np.int64),
        np.array([fingerprint for fingerprint, _ in stored], np.uint64),
        objects,
    )


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
