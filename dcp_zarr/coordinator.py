"""What the coordinator of a save does: decide all layouts first, complete the checkpoint last.

Both are functions of what every rank knows or returned; no trainer's and no container's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import engine, pieces
from dcp_zarr.errors import SaveError
from dcp_zarr.layout import object_layout
from dcp_zarr.names import OBJECTS_PATH
from dcp_zarr.placement import plan_save
from dcp_zarr.region import Region, Tiling, coordinates
from dcp_zarr.results import check_results
from dcp_zarr.schema import Entry, ObjectEntry, Schema, TensorEntry
from dcp_zarr.staged_sums import joined_sums
from dcp_zarr.value_sums import SummedValues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import Target
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.parts import Parts
    from dcp_zarr.placement import Placement, SaveOptions, TensorPlan
    from dcp_zarr.region import Shape
    from dcp_zarr.results import RankResult
    from dcp_zarr.tasks import Limits
    from dcp_zarr.value_sums import ValueSums

MAX_PACKED_OBJECT_BYTES = 1 << 20
"""Larger objects are stored by their own rank."""


@dataclass(frozen=True, slots=True)
class Description:
    """What of a checkpoint its writer knows only at the end."""

    save_id: str
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    storage_meta: Mapping[str, Any] | None
    metadata_version: str | None
    producer: Mapping[str, str]


def complete(
    target: Target,
    tensors: Mapping[str, TensorPlan],
    order: Sequence[str],
    results: Sequence[RankResult],
    options: SaveOptions,
    description: Description,
    limits: Limits,
) -> Schema:
    """Check what the ranks wrote, write what is the coordinator's to write, and commit.

    Parameters
    ----------
    target
        The container.
    tensors
        By FQN.
    order
        FQNs of all entries, tensors and objects, in DCP's order.
    results
        What each rank reports.
    options
        The save's options.
    description
        The rest of what the schema holds.
    limits
        Threads and memory.

    Returns
    -------
    The schema of what was saved.

    Raises
    ------
    SaveError
        If anything is missing, or was written by another layout.
    """
    objects = [fqn for fqn in order if fqn not in tensors]
    placement = plan_save(tensors, objects, options)
    layouts = placement.layouts
    parts = check_results(results, tensors, objects, placement)
    _check_placed(target, layouts, tensors, parts)
    nbytes = np.concatenate([result.stored_nbytes for result in results])
    stored = {fqn: int(nbytes[of_tensor.rows].sum()) for fqn, of_tensor in parts.items()}
    objects_codec = options.compression.codec(OBJECTS_PATH, 1, MAX_PACKED_OBJECT_BYTES)
    planned = (tensor_entry(layouts[fqn], plan, options) for fqn, plan in tensors.items())
    sink = target.open_last_sink(len(results), planned)
    summed: list[tuple[str, SummedValues]] = []
    try:
        counts = [len(result.parts.fqns) for result in results]
        tilings = {fqn: plan.tiling for fqn, plan in tensors.items()}
        cut = pieces.find_pieces(layouts, tilings, parts, counts)
        jobs = _cut_jobs(target, cut, placement, tensors, options, summed)
        for fqn, cut_nbytes in engine.write(jobs, sink, limits).items():
            stored[str(fqn)] += cut_nbytes
        entries, packed = _collect_objects(target, results, placement.paths)
        _check_own_arrays(target, entries, results)
        if packed is not None:
            job = bytes_job(*packed, objects_codec)
            engine.write([job], sink, limits)
    finally:
        sink.close()
    _join(target, placement, parts, len(results))
    sums: Mapping[str, ValueSums] = {}
    if options.statistics:
        sums = joined_sums(target, [result.parts.fqns for result in results], summed)
    for fqn, plan in tensors.items():
        entries[fqn] = tensor_entry(layouts[fqn], plan, options, stored[fqn], sums.get(fqn))
    schema = Schema(
        entries=tuple(entries[fqn] for fqn in order),
        save_id=description.save_id,
        objects_codec=objects_codec,
        planner_data=description.planner_data,
        storage_meta=description.storage_meta,
        metadata_version=description.metadata_version,
        producer=description.producer,
    )
    target.commit(schema)
    return schema


def tensor_entry(
    array: ArrayLayout,
    plan: TensorPlan,
    options: SaveOptions,
    stored_nbytes: int = 0,
    sums: ValueSums | None = None,
) -> TensorEntry:
    """Return what the schema says of a tensor."""
    codec = options.codec(array)
    tiling = plan.tiling if plan.told is None else plan.told
    return TensorEntry(array, plan.dtype, codec, tiling, plan.properties, stored_nbytes, sums)


def bytes_job(array: ArrayLayout, content: NDArray[np.uint8], codec: Codec) -> engine.WriteJob:
    """Return the job that writes an array of bytes whole."""
    whole = array.read_grid.touched(Region.whole(array.shape))
    return engine.WriteJob(array, codec, whole, lambda box: content[box.slices()])


def _check_placed(
    target: Target,
    layouts: Mapping[str, ArrayLayout],
    tensors: Mapping[str, TensorPlan],
    parts: Mapping[str, Parts],
) -> None:
    """Raise unless the coordinator sees every object that the ranks placed."""
    for fqn, array in layouts.items():
        tiling, ranks = tensors[fqn].tiling, parts[fqn].ranks
        placed: dict[Shape, int] = {}
        if tiling.is_whole:
            whole = Region.whole(array.write_grid.counts)
            placed = dict.fromkeys(coordinates(whole), int(ranks[0]))
        else:
            starts, sizes = array.read_grid.insides(tiling)
            placing = np.flatnonzero(sizes.all(axis=1))
            if array.has_one_object:
                placing = placing[:1]
            read_chunks = Tiling(tiling.shape, starts[placing], sizes[placing])
            for rank, of_rank in zip(ranks[placing].tolist(), read_chunks, strict=True):
                placed |= dict.fromkeys(coordinates(array.write_chunks_of(of_rank)), rank)
        target.check_placed(array, placed)


def _join(target: Target, placement: Placement, parts: Mapping[str, Parts], ranks: int) -> None:
    """Complete the objects that are shared, each from what ranks and coordinator placed."""
    for fqn, slabs in placement.slabs.items():
        counts = np.zeros(ranks + 1, np.int64)
        np.add.at(counts, [*parts[fqn].ranks, ranks], slabs[:, -1])
        target.join(placement.layouts[fqn], counts)


def _check_own_arrays(
    target: Target, entries: Mapping[str, Entry], results: Sequence[RankResult]
) -> None:
    """Raise unless the coordinator sees the arrays of large objects."""
    for rank, result in enumerate(results):
        for fqn, _ in result.objects.values():
            entry = entries.get(fqn)
            if entry is None or entry.array is None or entry.array.path == OBJECTS_PATH:
                continue
            whole = entry.array.write_grid.touched(Region.whole(entry.array.shape))
            target.check_placed(entry.array, dict.fromkeys(coordinates(whole), rank))


def _cut_jobs(
    target: Target,
    cut: Iterable[tuple[str, Mapping[Shape, Sequence[pieces.StagedPiece]]]],
    placement: Placement,
    tensors: Mapping[str, TensorPlan],
    options: SaveOptions,
    summed: list[tuple[str, SummedValues]],
) -> Iterator[engine.WriteJob]:
    """Yield a job for each cut read chunk; note what sums up its values, where that is wanted."""
    for fqn, read_chunks in cut:
        array, dtype = placement.layouts[fqn], tensors[fqn].dtype
        codec, slab = options.codec(array), placement.last_slab(fqn)
        for read_chunk, staged in read_chunks.items():
            one = Region(read_chunk, (1,) * len(read_chunk))
            values: Callable[[Region], NDArray[Any]] = partial(
                pieces.assemble, target, staged, dtype.bits
            )
            if options.statistics:
                values = SummedValues(values, dtype, array.shape)
                summed.append((fqn, values))
            yield engine.WriteJob(array, codec, one, values, key=fqn, slab=slab)


def _collect_objects(
    target: Target, results: Sequence[RankResult], paths: Mapping[str, str]
) -> tuple[dict[str, Entry], tuple[ArrayLayout, NDArray[np.uint8]] | None]:
    """Return an entry for each object, and the array of those that are packed with its bytes."""
    found: dict[str, pieces.StagedObject] = {}
    for rank, result in enumerate(results):
        if result.objects:
            for staged in pieces.staged_objects(target, rank):
                found[result.objects[staged.item][0]] = staged
        for fqn, _ in result.objects.values():
            if fqn not in found:
                raise SaveError(
                    f"Object {fqn!r} is not in what rank {rank} staged for {target.where!r}: is "
                    "the path shared, and its file system sound?",
                    fqn=fqn,
                    rank=rank,
                )
    payloads = [staged.content for staged in found.values() if staged.kind == pieces.PAYLOAD]
    packed = np.frombuffer(b"".join(payloads), np.uint8)
    shared = object_layout(OBJECTS_PATH, OBJECTS_PATH, packed.size)
    entries: dict[str, Entry] = {}
    offset = 0
    for fqn, staged in found.items():
        if staged.kind == pieces.JSON:
            entries[fqn] = ObjectEntry(fqn, json=(json.loads(staged.content),))
        elif staged.kind == pieces.ARRAY:
            array = object_layout(fqn, paths[fqn], staged.nbytes)
            entries[fqn] = ObjectEntry(fqn, (), array, 0, staged.nbytes)
        else:
            entries[fqn] = ObjectEntry(fqn, (), shared, offset, staged.nbytes)
            offset += staged.nbytes
    return entries, (shared, packed) if payloads else None
