"""What our part of planning takes where ranks and tensors are many: a save without data."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

import dcp_zarr
from benchmarks.memory import forget_peak, peak_nbytes
from dcp_zarr import zarr_format
from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.metadata_words import metadata_from

_Result = TypeVar("_Result")
_PROPERTIES = TensorProperties(dtype=torch.bfloat16)


class Case(NamedTuple):
    """What is saved: tensors as Shard(0), as DTensor cuts them."""

    name: str
    ranks: int
    tensors: int
    shape: Callable[[int], tuple[int, int]]


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield the cases, or small ones."""
    ranks, tensors, small = (16, 50, 100) if quick else (1024, 5000, 10_000)
    yield Case("even", ranks, tensors, lambda t: (4 * ranks, 4096 * (1 + t % 7)))
    yield Case("uneven", ranks, tensors, lambda t: (4 * ranks - 1 - t % 11, 4096 * (1 + t % 7)))
    yield Case("small", ranks // 4, small, lambda t: (ranks // 4, 8 * (1 + t % 7)))


def section(directory: Path, *, quick: bool) -> str:
    """Plan and finish each case; return what it took."""
    rows = [_row(case, directory) for case in cases(quick=quick)]
    head = (
        "| case | ranks | tensors | items | prepare_global_plan s | MB | finish s | MB "
        "| read_metadata s | MB | schema MB | documents MB |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return f"## planning, without data\n\n{head}{''.join(rows)}"


def _row(case: Case, directory: Path) -> str:
    gc.disable()  # torch's own items are millions; ours must not pay for them
    plans, metadata = _planned(case)
    gc.collect()
    gc.freeze()
    gc.enable()
    writer = _Writer(directory / f"{case.name}.zarr", compression=None)
    writer.reset()
    writer.set_up_storage_writer(is_coordinator=True)
    local = [writer.prepare_local_plan(plan) for plan in plans]
    final, *prepare = _measured(lambda: writer.prepare_global_plan(local))
    results = [_results(plan) for plan in final]
    _, *finish = _measured(lambda: writer.finish(metadata, results))
    root = writer.target.documents[-1]
    _, *read = _measured(lambda: metadata_from(zarr_format.read_root(root, where="nowhere")))
    gc.unfreeze()
    items = sum(len(plan.items) for plan in plans)
    stored = writer.target.documents
    numbers = [f"{seconds:.2f} | {nbytes / 1e6:.0f}" for seconds, nbytes in (prepare, finish, read)]
    sizes = f"{len(stored[-1]) / 1e6:.1f} | {sum(map(len, stored)) / 1e6:.1f}"
    return (
        f"| {case.name} | {case.ranks:,} | {case.tensors:,} | {items:,} | {' | '.join(numbers)} "
        f"| {sizes} |\n"
    )


def _planned(case: Case) -> tuple[list[SavePlan], Metadata]:
    """Return what DCP's planner would: each item of objects of its own."""
    told: dict[str, TensorStorageMetadata] = {}
    plans = []
    for rank in range(case.ranks):
        items = []
        for number in range(case.tensors):
            fqn, (rows, columns) = f"model.layers.{number}.weight", case.shape(number)
            step = -(-rows // case.ranks)
            start, stop = min(rank * step, rows), min(rank * step + step, rows)
            size = torch.Size([rows, columns])
            entry = told.setdefault(fqn, TensorStorageMetadata(_PROPERTIES, size, []))
            box = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([stop - start, columns]))
            index = MetadataIndex(fqn, box.offsets, len(entry.chunks))
            data = TensorWriteData(box, _PROPERTIES, torch.Size([rows, columns]))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            entry.chunks.append(box)
        plans.append(SavePlan(items))
    return plans, Metadata(told)


def _results(plan: SavePlan) -> list[WriteResult]:
    """Return what a rank would report."""
    result = plan.storage_data.result(plan.items, [100] * len(plan.items))
    first, *others = plan.items
    return [
        WriteResult(first.index, 100, result),
        *(WriteResult(item.index, 100, None) for item in others),
    ]


def _measured(act: Callable[[], _Result]) -> tuple[_Result, float, int]:
    """Return a result, the seconds it took, and the memory beyond what there was."""
    before, start = forget_peak(), time.perf_counter()
    result = act()
    return result, time.perf_counter() - start, peak_nbytes() - before


class _Writer(dcp_zarr.ZarrStorageWriter):
    """Writes nowhere."""

    def _new_target(self) -> Any:  # noqa: ANN401
        self.target = _Nowhere()
        return self.target


class _Nowhere:
    """A container that keeps nothing but what the documents are."""

    where = "nowhere"
    network_calls = 0
    documents: tuple[bytes, ...] = ()

    def prepare(self, ranks: int) -> None: ...
    def reserved_nbytes(self, tensors: Any) -> None: ...  # noqa: ANN401
    def check_placed(self, *args: Any) -> None: ...  # noqa: ANN401
    def join(self, *args: Any) -> None: ...  # noqa: ANN401
    def place(self, *args: Any) -> None: ...  # noqa: ANN401
    def close(self) -> None: ...

    def open_last_sink(self, *args: Any) -> _Nowhere:  # noqa: ANN401
        return self

    def read_staged(self, rank: int, name: str, offset: int, nbytes: int) -> bytes:
        """Return zeros and their checksum."""
        zeros = bytes(nbytes - CHECKSUM_BYTES)
        return zeros + checksum(zeros)

    def commit(self, schema: Any) -> None:  # noqa: ANN401
        self.documents = tuple(content for _, content in zarr_format.store_documents(schema))
