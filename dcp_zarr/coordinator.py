"""What the coordinator of a save does: decide all layouts first, complete the checkpoint last.

Both are functions of what every rank knows or returned; no trainer's and no container's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import engine, pieces
from dcp_zarr.errors import SaveError
from dcp_zarr.layout import Assignment, object_layout
from dcp_zarr.names import OBJECTS_PATH
from dcp_zarr.placement import fingerprint, path_fingerprint, plan_save
from dcp_zarr.region import Region, coordinates
from dcp_zarr.schema import Entry, ObjectEntry, Schema, TensorEntry
from dcp_zarr.staged_sums import joined_sums
from dcp_zarr.value_sums import SummedValues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import Target
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.placement import Placement, SaveOptions, TensorPlan
    from dcp_zarr.region import Shape
    from dcp_zarr.tasks import Limits
    from dcp_zarr.value_sums import ValueSums

MAX_PACKED_OBJECT_BYTES = 1 << 20
"""Larger objects are stored by their own rank."""


@dataclass(frozen=True, slots=True)
class Written:
    """One write item that a rank reports as done."""

    fqn: str
    region: Region | None
    """None for an object."""
    stored_nbytes: int
    fingerprint: int | None
    """Of the layout by which the rank wrote it."""


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
    results: Sequence[Sequence[Written]],
    options: SaveOptions,
    description: Description,
    limits: Limits,
) -> None:
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
        For each rank its write items, in the order in which it wrote them.
    options
        The save's options.
    description
        The rest of what the schema holds.
    limits
        Threads and memory.

    Raises
    ------
    SaveError
        If anything is missing, or was written by another layout.
    """
    objects = [fqn for fqn in order if fqn not in tensors]
    placement = plan_save(tensors, objects, options)
    layouts = placement.layouts
    assignments = [_assignments(rank, written, placement) for rank, written in enumerate(results)]
    _check_complete(tensors, objects, results)
    _check_placed(target, layouts, assignments)
    stored = _stored_nbytes(tensors, results)
    objects_codec = options.compression.codec(OBJECTS_PATH, 1, MAX_PACKED_OBJECT_BYTES)
    planned = (tensor_entry(layouts[fqn], plan, options) for fqn, plan in tensors.items())
    sink = target.open_last_sink(len(results), planned)
    summed: list[tuple[str, SummedValues]] = []
    try:
        cut = pieces.find_pieces(assignments)
        jobs = _cut_jobs(target, cut, placement, tensors, options, summed)
        for fqn, nbytes in engine.write(jobs, sink, limits).items():
            stored[str(fqn)] += nbytes
        entries, packed = _collect_objects(target, results, placement.paths)
        _check_own_arrays(target, entries, results)
        if packed is not None:
            job = bytes_job(*packed, objects_codec)
            engine.write([job], sink, limits)
    finally:
        sink.close()
    _join(target, placement, assignments)
    sums: Mapping[str, ValueSums] = {}
    if options.statistics:
        sums = joined_sums(target, [_written_parts(written) for written in results], summed)
    for fqn, plan in tensors.items():
        entries[fqn] = tensor_entry(layouts[fqn], plan, options, stored[fqn], sums.get(fqn))
    target.commit(
        Schema(
            entries=tuple(entries[fqn] for fqn in order),
            save_id=description.save_id,
            objects_codec=objects_codec,
            planner_data=description.planner_data,
            storage_meta=description.storage_meta,
            metadata_version=description.metadata_version,
            producer=description.producer,
        )
    )


def tensor_entry(
    array: ArrayLayout,
    plan: TensorPlan,
    options: SaveOptions,
    stored_nbytes: int = 0,
    sums: ValueSums | None = None,
) -> TensorEntry:
    """Return what the schema says of a tensor."""
    codec = options.codec(array)
    return TensorEntry(array, plan.dtype, codec, plan.tiling, plan.properties, stored_nbytes, sums)


def bytes_job(array: ArrayLayout, content: NDArray[np.uint8], codec: Codec) -> engine.WriteJob:
    """Return the job that writes an array of bytes whole."""
    whole = array.read_grid.touched(Region.whole(array.shape))
    return engine.WriteJob(array, codec, whole, lambda box: content[box.slices()])


def _stored_nbytes(
    tensors: Mapping[str, TensorPlan], results: Sequence[Sequence[Written]]
) -> dict[str, int]:
    """Return for each tensor the bytes that the ranks stored."""
    stored = dict.fromkeys(tensors, 0)
    for item in chain.from_iterable(results):
        if item.region is not None:
            stored[item.fqn] += item.stored_nbytes
    return stored


def _assignments(
    rank: int,
    written: Sequence[Written],
    placement: Placement,
) -> list[Assignment]:
    """Return what a rank's write items should have come to; raise where it was something else."""
    assignments = []
    for item in written:
        if item.region is not None and item.fqn in placement.layouts:
            assignments.append(placement.assignment(item.fqn, item.region))
            expected = fingerprint(assignments[-1])
        else:
            expected = path_fingerprint(placement.paths.get(item.fqn, ""))
        if expected != item.fingerprint:
            raise SaveError(
                f"Rank {rank} wrote {item.fqn!r} {item.region or ''} by an outdated plan; the "
                "save is given up. Use DefaultSavePlanner(enable_plan_caching=False).",
                fqn=item.fqn,
                region=str(item.region),
                rank=rank,
            )
    return assignments


def _written_parts(written: Sequence[Written]) -> list[str]:
    """Return the FQN of each part of a tensor that a rank wrote."""
    return [item.fqn for item in written if item.region is not None]


def _check_complete(
    tensors: Mapping[str, TensorPlan],
    objects: Sequence[str],
    results: Sequence[Sequence[Written]],
) -> None:
    """Raise unless the ranks report every region of every tensor, and every object."""
    done = {(item.fqn, item.region) for item in chain.from_iterable(results)}
    for fqn, plan in tensors.items():
        for region in plan.tiling:
            if (fqn, region) not in done:
                raise SaveError(
                    f"Tensor {fqn!r} {region} was written by no rank; the save is given up.",
                    fqn=fqn,
                    region=str(region),
                )
    for fqn in objects:
        if (fqn, None) not in done:
            raise SaveError(
                f"Object {fqn!r} was written by no rank: the save is given up.", fqn=fqn
            )


def _check_placed(
    target: Target, layouts: Mapping[str, ArrayLayout], assignments: Sequence[Sequence[Assignment]]
) -> None:
    """Raise unless the coordinator sees every object that the ranks placed."""
    placed: dict[str, dict[Shape, int]] = {fqn: {} for fqn in layouts}
    for rank, of_rank in enumerate(assignments):
        for assignment in of_rank:
            read_chunks = assignment.read_chunks
            if read_chunks.volume:
                write_chunks = assignment.array.write_chunks_of(read_chunks)
                placed[assignment.array.fqn] |= dict.fromkeys(coordinates(write_chunks), rank)
    for fqn, ranks in placed.items():
        target.check_placed(layouts[fqn], ranks)


def _join(
    target: Target, placement: Placement, assignments: Sequence[Sequence[Assignment]]
) -> None:
    """Complete the objects that are shared, each from what ranks and coordinator placed."""
    counts: dict[str, dict[int, int]] = {fqn: {} for fqn in placement.slabs}
    for rank, of_rank in enumerate(assignments):
        for assignment in of_rank:
            if assignment.slab is not None and assignment.slab.count:
                of_array = counts[assignment.array.fqn]
                of_array[rank] = of_array.get(rank, 0) + assignment.slab.count
    for fqn, of_array in counts.items():
        if own := placement.slabs[fqn][None].count:
            of_array[len(assignments)] = own
        target.join(placement.layouts[fqn], of_array)


def _check_own_arrays(
    target: Target, entries: Mapping[str, Entry], results: Sequence[Sequence[Written]]
) -> None:
    """Raise unless the coordinator sees the arrays of large objects."""
    for rank, written in enumerate(results):
        for item in written:
            entry = entries.get(item.fqn)
            if entry is None or entry.array is None or entry.array.path == OBJECTS_PATH:
                continue
            whole = entry.array.write_grid.touched(Region.whole(entry.array.shape))
            target.check_placed(entry.array, dict.fromkeys(coordinates(whole), rank))


def _cut_jobs(
    target: Target,
    cut: Mapping[str, Mapping[Shape, Sequence[pieces.StagedPiece]]],
    placement: Placement,
    tensors: Mapping[str, TensorPlan],
    options: SaveOptions,
    summed: list[tuple[str, SummedValues]],
) -> Iterator[engine.WriteJob]:
    """Yield a job for each cut read chunk; note what sums up its values, where that is wanted."""
    for fqn, read_chunks in cut.items():
        array, dtype = placement.layouts[fqn], tensors[fqn].dtype
        codec, slab = options.codec(array), placement.slab(fqn, None)
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
    target: Target, results: Sequence[Sequence[Written]], paths: Mapping[str, str]
) -> tuple[dict[str, Entry], tuple[ArrayLayout, NDArray[np.uint8]] | None]:
    """Return an entry for each object, and the array of those that are packed with its bytes."""
    found: dict[str, pieces.StagedObject] = {}
    for rank, written in enumerate(results):
        if any(item.region is None for item in written):
            for staged in pieces.staged_objects(target, rank):
                found[written[staged.item].fqn] = staged
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
