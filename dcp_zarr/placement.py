"""What a save decides before the first byte: options, layouts, paths and slabs.

A pure function of what all ranks plan, so that the coordinator can come to it twice: for the plans,
and again, to check what the ranks did, from the `Metadata`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from dcp_zarr.codecs import CHECKSUM_BYTES, NONE
from dcp_zarr.layout import Assignment
from dcp_zarr.layout_rules import LayoutOptions, plan_layouts, shares_object
from dcp_zarr.names import assign_paths
from dcp_zarr.slabs import Slab, plan_slabs

if TYPE_CHECKING:
    from dcp_zarr.codecs import Codec, CompressionRules
    from dcp_zarr.dtypes import DType
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Region, Shape, Tiling


_OBJECT_BYTES = (1 << 20) + (1 << 15)
"""Most bytes of a stored part of an object (which no plan knows the size of), and around it."""
_AROUND_OBJECT_BYTES = 128
"""What stands around a stored object, its path twice not counted."""
_COORDINATE_BYTES = 20
"""Longest coordinate in an object's name."""
_AROUND_READ_CHUNK_BYTES = CHECKSUM_BYTES + 16
"""A read chunk's checksum, and its place in an index."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What decides the bytes of a save; the same on all ranks."""

    compression: CompressionRules
    layout: LayoutOptions
    dtype_encoding: str
    own_object_arrays: bool = True
    """Whether ranks store large objects themselves; else the coordinator stores all."""
    statistics: bool = False
    """Whether the values are summed up on their way."""

    def codec(self, array: ArrayLayout) -> Codec:
        """Return how an array's read chunks are compressed."""
        if self.compression.filters and not array.shape:
            return NONE  # HDF5 stores it without read chunks
        return self.compression.codec(array.fqn, array.itemsize, array.read_chunk_nbytes)

    def __str__(self) -> str:
        """Describe the options so that equal ones have equal descriptions."""
        encoded = f"{self.compression} {self.layout} dtype_encoding={self.dtype_encoding}"
        return f"{encoded} statistics={self.statistics}"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of a save."""

    dtype: DType
    tiling: Tiling
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of a save goes."""

    layouts: Mapping[str, ArrayLayout]
    """Of the tensors, by FQN."""
    paths: Mapping[str, str]
    """Of tensors and objects, by FQN."""
    slabs: Mapping[str, Mapping[Shape | None, Slab]]
    """By FQN of tensors whose writers share an object, and by the offsets of regions that are not
    empty; None is the coordinator."""

    def assignment(self, fqn: str, region: Region) -> Assignment:
        """Return what a write item comes to."""
        return Assignment(self.layouts[fqn], region, self.slab(fqn, region))

    def slab(self, fqn: str, region: Region | None) -> Slab | None:
        """Return where a region's read chunks go, or the coordinator's, in a shared object."""
        shared = self.slabs.get(fqn)
        if shared is None or (region is not None and not region.volume):
            return None
        return shared[None if region is None else region.offsets]


def plan_save(
    tensors: Mapping[str, TensorPlan], objects: Sequence[str], options: SaveOptions
) -> Placement:
    """Decide the layout of every tensor, and the path of everything.

    Parameters
    ----------
    tensors
        By FQN.
    objects
        FQNs of what is no tensor.
    options
        The save's options.
    """
    if tensors or objects:  # DCP's plan cache may pass none
        options.compression.check_patterns([*tensors, *objects])
    paths = assign_paths([*tensors, *objects])
    layouts = plan_layouts(
        {fqn: plan.tiling for fqn, plan in sorted(tensors.items())},
        {fqn: plan.dtype for fqn, plan in tensors.items()},
        paths,
        options.layout,
    )
    slabs = {
        fqn: _slabs(array, tensors[fqn], options)
        for fqn, array in layouts.items()
        if shares_object(array, tensors[fqn].tiling)
    }
    return Placement(layouts, paths, slabs)


def _slabs(array: ArrayLayout, plan: TensorPlan, options: SaveOptions) -> dict[Shape | None, Slab]:
    """Divide the one object of an array among its regions and, last, the coordinator."""
    codec = options.codec(array)
    tiling = plan.tiling.without_empty()
    counts = array.read_grid.inside_counts(tiling)
    counts.append(prod(array.read_grid.counts) - sum(counts))
    whole = array.read_chunk_nbytes
    one = codec.expected_nbytes(plan.dtype.torch_name, whole) + CHECKSUM_BYTES
    slabs = plan_slabs(
        [one * n for n in counts], [codec.largest_nbytes(whole)] * len(counts), counts
    )
    offsets = map(tuple, tiling.offsets.tolist())
    return dict(zip([*offsets, None], slabs, strict=True))


def rank_slabs(
    ranks: Sequence[Sequence[Assignment | str]],
    tensors: Mapping[str, TensorPlan],
    options: SaveOptions,
    start: int,
) -> list[Slab]:
    """Divide a container that is one file among the ranks.

    Parameters
    ----------
    ranks
        For each rank what its write items come to; an object is text.
    tensors
        By FQN.
    options
        The save's options.
    start
        Where the first slab begins.
    """
    expected, largest, counts = [], [], []
    for of_rank in ranks:
        nbytes, most = 0, (_OBJECT_BYTES if of_rank else 0)
        for assignment in of_rank:
            if isinstance(assignment, str):
                continue
            read_chunks = assignment.read_chunks
            if not read_chunks.volume:
                continue
            array = assignment.array
            codec = options.codec(array)
            name = tensors[array.fqn].dtype.torch_name
            whole, per_object = array.read_chunk_nbytes, prod(array.read_chunks_per_write_chunk)
            objects = array.write_chunks_of(read_chunks).volume
            around = _AROUND_OBJECT_BYTES + len(array.path) + _COORDINATE_BYTES * len(array.shape)
            each = codec.expected_nbytes(name, whole) + _AROUND_READ_CHUNK_BYTES
            nbytes += read_chunks.volume * each + objects * around
            placed = codec.largest_nbytes(whole) + _AROUND_READ_CHUNK_BYTES
            most = max(most, per_object * placed + around)
        expected.append(nbytes)
        largest.append(most)
        counts.append(len(of_rank))
    return plan_slabs(expected, largest, counts, start)


def fingerprint(assignment: Assignment) -> int:
    """Return a number that differs where an item would be written in another way."""
    array, region = assignment.array, assignment.region
    shapes = array.shape, array.read_chunk_shape, array.write_chunk_shape
    placed = f"{shapes} {region.offsets} {region.sizes} {assignment.slab}"
    described = f"{array.path} {array.itemsize} {placed}"
    return zlib.crc32(described.encode("utf-8", "surrogatepass"))


def path_fingerprint(path: str) -> int:
    """Return a number that differs where an object's bytes would lie elsewhere."""
    return zlib.crc32(path.encode())
