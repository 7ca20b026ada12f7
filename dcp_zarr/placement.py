"""What a save decides before the first byte: options, layouts, paths and slabs.

A pure function of what all ranks plan, so that the coordinator can come to it twice: for the plans,
and again, to check what the ranks did, from the `Metadata`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, NONE
from dcp_zarr.layout_rules import LayoutOptions, plan_layouts, shares_object
from dcp_zarr.names import assign_paths
from dcp_zarr.slabs import Slab, plan_slabs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec, CompressionRules
    from dcp_zarr.dtypes import DType
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.parts import Parts, RankParts
    from dcp_zarr.region import Tiling

_OBJECT_BYTES = (1 << 20) + (1 << 15)
"""Most bytes of a stored part of an object (which no plan knows the size of), and around it."""
_AROUND_OBJECT_BYTES = 128
"""What stands around a stored object, its path twice not counted."""
_COORDINATE_BYTES = 20
"""Longest coordinate in an object's name."""
_AROUND_READ_CHUNK_BYTES = CHECKSUM_BYTES + 16
"""A read chunk's checksum, and its place in an index."""
_MAX_AXES = 64
"""PyTorch knows no more."""
_FACTORS = np.cumprod(
    np.full(2 * _MAX_AXES + len(fields(Slab)), 6364136223846793005, np.uint64), dtype=np.uint64
)
"""Weighs the numbers of a fingerprint: powers of an odd number, modulo 2**64."""


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
    """What the ranks write."""
    properties: Mapping[str, Any] = field(default_factory=dict)
    told: Tiling | None = None
    """What DCP planned, where ranks write shares of that."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of a save goes."""

    layouts: Mapping[str, ArrayLayout]
    """Of the tensors, by FQN."""
    paths: Mapping[str, str]
    """Of tensors and objects, by FQN."""
    slabs: Mapping[str, NDArray[np.int64]]
    """By FQN of tensors whose writers share an object: a row for each region of the tiling and,
    last, one for the coordinator."""

    def last_slab(self, fqn: str) -> Slab | None:
        """Return where the coordinator's read chunks go in a shared object."""
        rows = self.slabs.get(fqn)
        return None if rows is None else Slab.of(rows[-1])

    def slab_rows(
        self, parts: Mapping[str, Parts], counts: Sequence[int]
    ) -> list[NDArray[np.int64]]:
        """Return for each rank, and each of its parts, a row: its slab, or zeros.

        Parameters
        ----------
        parts
            By FQN, in the order of the tilings.
        counts
            For each rank, the number of its parts.
        """
        found = np.zeros((sum(counts), len(fields(Slab))), np.int64)
        for fqn, rows in self.slabs.items():
            found[parts[fqn].rows] = rows[:-1]
        return np.split(found, np.cumsum(counts)[:-1])


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
    slabs: dict[str, NDArray[np.int64]] = {}
    known: dict[tuple[Any, ...], NDArray[np.int64]] = {}
    for fqn, array in layouts.items():
        plan = tensors[fqn]
        if shares_object(array, plan.tiling):
            codec = options.codec(array)
            alike = plan.tiling, plan.dtype.torch_name, codec, array.read_chunk_shape
            if alike not in known:
                known[alike] = _slabs(array, plan, codec)
            slabs[fqn] = known[alike]
    return Placement(layouts, paths, slabs)


def _slabs(array: ArrayLayout, plan: TensorPlan, codec: Codec) -> NDArray[np.int64]:
    """Divide the one object of an array among its regions and, last, the coordinator."""
    _, sizes = array.read_grid.insides(plan.tiling)
    counts = sizes.prod(axis=1)
    counts = np.append(counts, prod(array.read_grid.counts) - counts.sum())
    whole = array.read_chunk_nbytes
    one = codec.expected_nbytes(plan.dtype.torch_name, whole) + CHECKSUM_BYTES
    return plan_slabs(one * counts, codec.largest_nbytes(whole), counts)


def rank_slabs(
    placement: Placement,
    tensors: Mapping[str, TensorPlan],
    parts: Mapping[str, Parts],
    items: Sequence[int],
    options: SaveOptions,
    start: int,
) -> list[Slab]:
    """Divide a container that is one file among the ranks.

    Parameters
    ----------
    placement
        Where everything goes.
    tensors
        By FQN.
    parts
        By FQN, in the order of the tilings.
    items
        For each rank, the number of its write items.
    options
        The save's options.
    start
        Where the first slab begins.
    """
    counts = np.array(items, np.int64)
    expected, largest = np.zeros_like(counts), np.where(counts > 0, _OBJECT_BYTES, 0)
    known: dict[tuple[Any, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for fqn, plan in tensors.items():
        array, ranks = placement.layouts[fqn], parts[fqn].ranks
        alike = plan.tiling, array.read_chunk_shape, array.write_chunk_shape
        if alike not in known:
            known[alike] = _held(array, plan.tiling)
        read_chunks, objects = known[alike]
        codec, whole = options.codec(array), array.read_chunk_nbytes
        around = _AROUND_OBJECT_BYTES + len(array.path) + _COORDINATE_BYTES * len(array.shape)
        each = codec.expected_nbytes(plan.dtype.torch_name, whole) + _AROUND_READ_CHUNK_BYTES
        most = codec.largest_nbytes(whole) + _AROUND_READ_CHUNK_BYTES
        np.add.at(expected, ranks, read_chunks * each + objects * around)
        needed = prod(array.read_chunks_per_write_chunk) * most + around
        np.maximum.at(largest, ranks, needed * (read_chunks > 0))
    return [Slab.of(row) for row in plan_slabs(expected, largest, counts, start)]


def _held(array: ArrayLayout, tiling: Tiling) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each region how many read chunks it holds, and in how many write chunks."""
    starts, sizes = array.read_grid.insides(tiling)
    per_object = np.array(array.read_chunks_per_write_chunk, np.int64)
    objects = (-(-(starts + sizes) // per_object) - starts // per_object).prod(axis=1)
    read_chunks: NDArray[np.int64] = sizes.prod(axis=1)
    return read_chunks, objects * (read_chunks > 0)


def fingerprints(
    parts: RankParts, layouts: NDArray[np.uint64], slabs: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return for each part a number that differs where it would be written in another way.

    Parameters
    ----------
    parts
        Of one rank.
    layouts
        For each part, the fingerprint of its tensor's layout.
    slabs
        For each part, its slab or zeros.
    """
    ends = np.cumsum(parts.axes)
    axis = np.arange(ends[-1:].sum()) - np.repeat(ends - parts.axes, parts.axes)
    boxes = parts.offsets.astype(np.uint64) * _FACTORS[axis]
    boxes += parts.sizes.astype(np.uint64) * _FACTORS[_MAX_AXES + axis]
    sums = np.append(np.uint64(0), np.cumsum(boxes))
    found: NDArray[np.uint64] = layouts + sums[ends] - sums[ends - parts.axes]
    found += (slabs.astype(np.uint64) * _FACTORS[2 * _MAX_AXES :]).sum(axis=1, dtype=np.uint64)
    return found


def layout_fingerprint(array: ArrayLayout) -> int:
    """Return a number that differs where an array would be laid out in another way."""
    shapes = array.shape, array.read_chunk_shape, array.write_chunk_shape
    described = f"{array.path} {array.itemsize} {shapes}"
    return zlib.crc32(described.encode("utf-8", "surrogatepass"))


def path_fingerprint(path: str) -> int:
    """Return a number that differs where an object's bytes would lie elsewhere."""
    return zlib.crc32(path.encode())
