"""One rank's part of a save: from write items to jobs for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.storage import WriteResult

from dcp_zarr import coordinator, engine, pieces, placement, tensors
from dcp_zarr.canonical_json import json_text
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import SaveError, UnsafeObjectError
from dcp_zarr.layout import Assignment, object_layout
from dcp_zarr.names import OBJECTS_PATH
from dcp_zarr.plan_words import RankItems, item_region
from dcp_zarr.results import RankResult
from dcp_zarr.slabs import Slab
from dcp_zarr.staged_sums import stage_sums
from dcp_zarr.value_sums import SummedValues, ValueSums

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from dcp_zarr.container import Sink
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.placement import SaveOptions
    from dcp_zarr.region import Region, Shape
    from dcp_zarr.tasks import Limits

    Values = Callable[[Region], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What travels with a `SavePlan` to its rank: layout only, so that DCP may cache it."""

    options: str
    """Container and options by which the plan was made."""
    rank: int
    """Group rank."""
    layouts: tuple[ArrayLayout | str, ...]
    """For each write item its tensor's layout; for an object, the path of its bytes."""
    slabs: NDArray[np.int64]
    """For each item that is a part of a tensor, its slab in a shared object, or zeros."""
    wholes: Mapping[int, Region]
    """By the number of the item, the region that the rank holds where it writes a share of it."""
    slab: Slab | None
    """The rank's part of the container, where that is one file."""

    def assignments(self, items: Sequence[WriteItem]) -> list[Assignment | str]:
        """Return what each write item comes to."""
        slabs = iter(self.slabs)
        return [
            layout if isinstance(layout, str) else _assignment(item, layout, next(slabs))
            for item, layout in zip(items, self.layouts, strict=True)
        ]

    def result(self, items: Sequence[WriteItem], nbytes: Sequence[int]) -> RankResult:
        """Return what the coordinator has to know when the rank is done.

        Parameters
        ----------
        items
            The rank's write items.
        nbytes
            For each item, what of it was stored.
        """
        arrays = [array for array in self.layouts if not isinstance(array, str)]
        fingerprints = np.array([*map(placement.layout_fingerprint, arrays)], np.uint64)
        objects = {
            number: (item.index.fqn, placement.path_fingerprint(path))
            for number, (item, path) in enumerate(zip(items, self.layouts, strict=True))
            if isinstance(path, str)
        }
        stored = [size for number, size in enumerate(nbytes) if number not in objects]
        parts = RankItems.of(items).parts
        return RankResult(
            parts,
            np.array(stored, np.int64),
            placement.fingerprints(parts, fingerprints, self.slabs),
            objects,
            frozenset(items[number].index.fqn for number in self.wholes),
        )


def _assignment(item: WriteItem, array: ArrayLayout, slab: NDArray[np.int64]) -> Assignment:
    if item.index.fqn != array.fqn:
        raise SaveError(
            f"Tensor {array.fqn!r} was planned, but {item.index.fqn!r} is to be written: the "
            "planner renamed it after all ranks had planned. Rename it in set_up_planner.",
            fqn=array.fqn,
        )
    return Assignment(array, item_region(item), Slab.of(slab) if slab[-1] else None)


class RankSave:
    """One rank's part of one save."""

    def __init__(
        self,
        plan: SavePlan,
        rank_plan: RankPlan,
        planner: SavePlanner,
        sink: Sink,
        options: SaveOptions,
    ) -> None:
        self._plan = rank_plan
        self._items = list(zip(plan.items, rank_plan.assignments(plan.items), strict=True))
        self._planner = planner
        self._sink = sink
        self._options = options
        self._objects = pieces.ObjectStager(sink)
        self._object_sizes: dict[int, int] = {}
        self._summed: dict[int, SummedValues] = {}

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of the read chunks that this rank writes."""
        assignments = [a for _, a in self._items if not isinstance(a, str)]
        return sum(a.read_chunks.volume * a.array.read_chunk_nbytes for a in assignments)

    def run(self, limits: Limits, told: Callable[[int], None] | None = None) -> list[WriteResult]:
        """Write everything, and tell of bytes; return a result for each item, in order."""
        stored = engine.write(self._jobs(), self._sink, limits, told)
        if self._options.statistics:
            stage_sums(self._sink, list(self._sums()))
        nbytes = [
            self._object_sizes[number] if isinstance(assignment, str) else stored.get(number, 0)
            for number, (_, assignment) in enumerate(self._items)
        ]
        items = [item for item, _ in self._items]
        carried: list[RankResult | None] = [self._plan.result(items, nbytes)]
        carried += [None] * (len(nbytes) - 1)
        return [
            WriteResult(item.index, size, result)
            for (item, _), size, result in zip(self._items, nbytes, carried, strict=True)
        ]

    def _sums(self) -> Iterator[ValueSums]:
        """Yield what each item that is a part of a tensor comes to, its pieces left out."""
        for number, (_, assignment) in enumerate(self._items):
            if not isinstance(assignment, str):
                summed = self._summed.get(number)
                yield ValueSums() if summed is None else summed.sums()

    def _summed_up(self, number: int, item: WriteItem, values: Values, shape: Shape) -> Values:
        """Return the values of an item, to be summed up on their way where that is wanted."""
        if not self._options.statistics:
            return values
        assert item.tensor_data is not None  # noqa: S101
        dtype = dtype_of(tensors.torch_name(item.tensor_data.properties.dtype))
        self._summed[number] = SummedValues(values, dtype, shape)
        return self._summed[number]

    def _jobs(self) -> Iterator[engine.WriteJob]:
        """Stage what the coordinator finishes; yield jobs for the rest."""
        staged = 0
        for number, (item, assignment) in enumerate(self._items):
            if isinstance(assignment, str):
                yield from self._object(number, item, assignment)
                continue
            held = self._plan.wholes.get(number, assignment.region)
            values = _LazyValues(item, assignment, held, self._planner, self._sink, staged)
            if assignment.pieces_nbytes:
                staged += pieces.staged_nbytes(assignment)
            array = assignment.array
            read_chunks = assignment.read_chunks
            if read_chunks.volume:
                yield engine.WriteJob(
                    array,
                    self._options.codec(array),
                    read_chunks,
                    self._summed_up(number, item, values, array.shape),
                    key=number,
                    slab=assignment.slab,
                )
            elif assignment.pieces_nbytes:
                values.resolved()

    def _object(self, number: int, item: WriteItem, path: str) -> Iterator[engine.WriteJob]:
        """Stage a small object; yield the job for a large one."""
        payload = self._planner.resolve_data(item).getbuffer()  # type: ignore[union-attr]
        self._object_sizes[number] = len(payload)
        large = len(payload) > coordinator.MAX_PACKED_OBJECT_BYTES
        if large and self._options.own_object_arrays:
            self._objects.add(number, pieces.ARRAY, b"", len(payload))
            array = object_layout(item.index.fqn, path, len(payload))
            codec = self._options.compression.codec(
                OBJECTS_PATH, 1, coordinator.MAX_PACKED_OBJECT_BYTES
            )
            content = np.frombuffer(payload, np.uint8)
            yield coordinator.bytes_job(array, content, codec)
        elif not large and (text := as_json(payload)) is not None:
            self._objects.add(number, pieces.JSON, text, len(text))
        else:
            self._objects.add(number, pieces.PAYLOAD, payload, len(payload))


def rank_result(results: Sequence[WriteResult]) -> RankResult:
    """Return what a rank's results tell; a rank that wrote nothing tells nothing."""
    if not results:
        return RankResult.nothing()
    told = results[0].storage_data
    assert isinstance(told, RankResult)  # noqa: S101
    return told


def as_json(payload: memoryview) -> bytes | None:
    """Return an object's bytes as JSON, where torch can read them and JSON holds the value."""
    try:
        return json_text(tensors.object_value(payload, ""))
    except (UnsafeObjectError, EOFError, LookupError, RuntimeError, TypeError, ValueError):
        return None


class _LazyValues:
    """The bits of one write item: resolved when the first are wanted, dropped with the last."""

    def __init__(
        self,
        item: WriteItem,
        assignment: Assignment,
        held: Region,
        planner: SavePlanner,
        sink: Sink,
        staged: int,
    ) -> None:
        self._item = item
        self._assignment = assignment
        self._held = held
        self._planner = planner
        self._sink = sink
        self._staged = staged
        self._lock = threading.Lock()
        self._values: Callable[[Region], NDArray[Any]] | None = None
        itemsize = assignment.array.itemsize
        self._wanted = assignment.region.volume - assignment.pieces_nbytes // itemsize

    def __call__(self, region: Region) -> NDArray[Any]:
        with self._lock:
            values = self._values or self.resolved()
            self._wanted -= region.volume
            self._values = values if self._wanted else None
        return values(region)

    def resolved(self) -> Callable[[Region], NDArray[Any]]:
        """Resolve the tensor and stage its pieces; once."""
        values = tensors.values_of(self._resolve(), self._held)
        if self._assignment.pieces_nbytes:
            pieces.stage_pieces(self._sink, self._staged, self._assignment, values)
        return values

    def _resolve(self) -> torch.Tensor:
        fqn, region = self._assignment.array.fqn, self._held
        tensor = self._planner.resolve_data(self._item)
        assert isinstance(tensor, torch.Tensor)  # noqa: S101
        assert self._item.tensor_data is not None  # noqa: S101
        planned = self._item.tensor_data.properties.dtype
        tensors.stored_dtype(tensor, fqn)
        if tuple(tensor.shape) != region.sizes or tensor.dtype != planned:
            raise SaveError(
                f"Tensor {fqn!r} {region} was planned as {planned} of {region.sizes}, but is now "
                f"{tensor.dtype} of {tuple(tensor.shape)}. Do not change it during a save, nor "
                "between saves with DefaultSavePlanner(enable_plan_caching=True).",
                fqn=fqn,
                region=str(region),
            )
        return tensor
