"""Files of ``torch.save`` and directories of torch's DCP: torch writes them, without the values.

Tensors are fake, and torch skips their bytes (`torch.serialization.skip_data`): what it writes is
its own format, with room for each storage. The values are streamed to their places afterwards.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_zarr import metadata_words, state_dicts, tensors
from dcp_zarr.containers.foreign import torch_save
from dcp_zarr.containers.foreign.storages import StorageRecord, find_storages
from dcp_zarr.local_files import sync_file
from dcp_zarr.region import Region
from dcp_zarr.value_copies import Placed, copy_values

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema
    from dcp_zarr.tasks import Limits

Wrote = Callable[[int], None]


def write_file(
    path: str,
    source: Source,
    schema: Schema,
    objects: Mapping[str, Any],
    limits: Limits,
    wrote: Wrote,
) -> None:
    """Write a new file of ``torch.save``, nested as the state dict was.

    Parameters
    ----------
    path
        The file.
    source
        Where the values are.
    schema
        What is to be in the file.
    objects
        The values of objects, by FQN.
    limits
        Threads and memory.
    wrote
        Told of bytes that are written.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    values = {entry.fqn: objects.get(entry.fqn) for entry in schema.entries}
    for fqn, entry in schema.tensors.items():
        fake = _fake(entry.dtype.torch_name, entry.array.shape)
        values[fqn] = fake.requires_grad_() if entry.properties.get("requires_grad") else fake
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state_dicts.nested(values, schema.planner_data or {}), path)
    made = torch_save.open_file(path)
    parts = (
        Placed(entry, Region.whole(entry.array.shape), made.places(fqn)[0].start)
        for fqn, entry in schema.tensors.items()
    )
    with _opened(path) as fd:
        storages = list(find_storages(fd, 0, os.fstat(fd).st_size))
        _fill(fd, parts, storages, source, limits, wrote)


def write_directory(
    path: str,
    source: Source,
    schema: Schema,
    objects: Mapping[str, bytes],
    limits: Limits,
    wrote: Wrote,
    *,
    final_path: str,
) -> None:
    """Write a new directory of torch's DCP: all regions in one file; parameters as of `write_file`.

    Parameters
    ----------
    objects
        The bytes of objects, as `torch.save` writes them, by FQN.
    final_path
        Where the directory will be.
    """
    metadata = metadata_words.metadata_from(schema)
    if metadata.planner_data is None:  # as `dcp.save` has it of a dict that is flat
        metadata.planner_data = {fqn: (fqn,) for fqn in metadata.state_dict_metadata}
    writer = _Writer(path, final_path)
    planner = _Planner(metadata, objects)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    (plan,) = writer.prepare_global_plan([local])
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
    # One rank and one thread have one file.
    with _opened(str(Path(path, results[0].storage_data.relative_path))) as fd:
        parts, storages = _places(fd, results, schema, metadata)
        _fill(fd, parts, storages, source, limits, wrote)


def _fake(torch_name: str, shape: Shape) -> torch.Tensor:
    """Return a tensor without values."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.empty(shape, dtype=tensors.torch_dtype(torch_name))


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a file to be filled; when it is, make it durable."""
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
        sync_file(fd)
    finally:
        os.close(fd)


def _fill(
    fd: int,
    parts: Iterable[Placed],
    storages: Iterable[StorageRecord],
    source: Source,
    limits: Limits,
    wrote: Wrote,
) -> None:
    """Write values to their places, then the checksums of all storages."""
    for nbytes in copy_values(parts, source, fd, limits):
        wrote(nbytes)
    with ThreadPoolExecutor(limits.thread_count) as pool:
        for _ in pool.map(lambda storage: storage.set_crc(fd), storages):
            pass


class _Writer(FileSystemWriter):
    """torch's own, which tells of the path that the directory will have."""

    def __init__(self, path: str, final_path: str) -> None:
        # Nothing is copied ahead: there are no values.
        super().__init__(path, per_thread_copy_ahead=0)
        self.transforms: Any = _Unchanged()
        self._final_path = final_path

    def storage_meta(self) -> StorageMeta:
        """Return what DCP records of the storage."""
        return StorageMeta(checkpoint_id=self._final_path, save_id=self.save_id)


class _Unchanged:
    """Stands for what would compress an item: gives torch the file, in which it can skip data."""

    def transform_save_stream(self, _: WriteItem, raw: io.IOBase) -> tuple[_KeptOpen, list[str]]:
        """Return where an item is written, and that nothing is done to it."""
        return _KeptOpen(raw), []


class _KeptOpen:
    """A file that is closed by whoever opened it."""

    def __init__(self, raw: Any) -> None:  # noqa: ANN401
        self.write, self.seek, self.flush = raw.write, raw.seek, raw.flush

    def close(self) -> None:
        """Do nothing: more is to come."""


class _Planner(SavePlanner):
    """Plans a save of what a checkpoint's `Metadata` tells, region by region."""

    def __init__(self, metadata: Metadata, objects: Mapping[str, bytes]) -> None:
        self._metadata = metadata
        self._objects = objects

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Return a write item for each region and object."""
        items = []
        for fqn, told in self._metadata.state_dict_metadata.items():
            if isinstance(told, BytesStorageMetadata):
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
                continue
            kind = WriteItemType.SHARD if len(told.chunks) > 1 else WriteItemType.TENSOR
            for number, box in enumerate(told.chunks):
                index = MetadataIndex(fqn, box.offsets, number)
                described = TensorWriteData(box, told.properties, told.size)
                items.append(WriteItem(index, kind, tensor_data=described))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave the plan as it is."""
        return all_plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an object's bytes, or a tensor without values."""
        told = write_item.tensor_data
        if told is None:
            return io.BytesIO(self._objects[write_item.index.fqn])
        name = tensors.torch_name(told.properties.dtype)
        return _fake(name, tuple(told.chunk.sizes))


def _places(
    fd: int, results: Iterable[Any], schema: Schema, metadata: Metadata
) -> tuple[list[Placed], list[StorageRecord]]:
    """Return where regions go in a file, and the storages that they lie in."""
    parts, storages = [], []
    for result in results:
        told = metadata.state_dict_metadata[result.index.fqn]
        if not isinstance(told, TensorStorageMetadata):
            continue
        lying = result.storage_data
        for storage in find_storages(fd, lying.offset, lying.length):  # one; none where it is empty
            box = told.chunks[result.index.index]
            region = Region(tuple(box.offsets), tuple(box.sizes))
            parts.append(Placed(schema.tensors[result.index.fqn], region, storage.start))
            storages.append(storage)
    return parts, storages
