"""Boxes in a tensor's index space, and tilings made of them.

A region is half-open: on axis ``a`` it holds the elements ``offsets[a] <= i < offsets[a] +
sizes[a]``. All numbers are elements of the whole tensor. Nothing here knows bytes or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REGIONS = 1 << 20
"""Most regions of one tensor."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A half-open box of a tensor's elements.

    Examples
    --------
    >>> region = Region(offsets=(2, 0), sizes=(3, 4))
    >>> str(region), region.volume, region.ends
    ('[2:5, 0:4]', 12, (5, 4))
    >>> region.intersection(Region((4, 1), (9, 2)))
    Region(offsets=(4, 1), sizes=(1, 2))
    """

    offsets: Shape
    """First element on each axis."""
    sizes: Shape
    """Number of elements on each axis; zero is allowed."""

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """Return the region that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ends(self) -> Shape:
        """One past the last element on each axis."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def intersection(self, other: Region) -> Region:
        """Return what both regions hold; its `volume` is zero where they do not meet."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        return Region(starts, tuple(max(e - s, 0) for s, e in zip(starts, ends, strict=True)))

    def index(self, origin: Shape | None = None) -> Any:  # noqa: ANN401
        """Return the index that views this region of an array that starts at `origin`.

        It ends with an ellipsis, so that an array without axes gives a view and no scalar.
        """
        return (*self.slices(origin), ...)

    def slices(self, origin: Shape | None = None) -> tuple[slice, ...]:
        """Return the slices that select this region from an array that starts at `origin`."""
        origin = origin or (0,) * len(self.offsets)
        return tuple(
            slice(o - b, o - b + s)
            for o, b, s in zip(self.offsets, origin, self.sizes, strict=True)
        )

    def __str__(self) -> str:
        """Write the region as Python slices."""
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.slices()) + "]"


@dataclass(frozen=True, eq=False)
class Tiling:
    """Regions that cover a tensor exactly once, as columns of numbers.

    Empty regions may be among them; they cover nothing. Equal only to itself.
    """

    shape: Shape
    """Shape of the tensor."""
    offsets: NDArray[np.int64]
    """Offsets of the regions, of shape ``(regions, axes)``."""
    sizes: NDArray[np.int64]
    """Sizes of the regions, of shape ``(regions, axes)``."""

    @classmethod
    def of(cls, shape: Shape, regions: list[Region]) -> Tiling:
        """Make a tiling from regions; nothing is checked."""
        columns = (len(regions), len(shape))
        offsets = np.array([r.offsets for r in regions], np.int64).reshape(columns)
        sizes = np.array([r.sizes for r in regions], np.int64).reshape(columns)
        return cls(shape, offsets, sizes)

    @classmethod
    @lru_cache
    def whole(cls, shape: Shape) -> Tiling:
        """Return the tiling of one region; one value for all tensors of a shape."""
        return cls.of(shape, [Region.whole(shape)])

    @classmethod
    @lru_cache(maxsize=64)
    def of_grid(cls, shape: Shape, step: Shape, count: Shape) -> Tiling:
        """Make a tiling of a grid's boxes in C order, clipped; those beyond the tensor are empty.

        One value for tensors that are placed alike.

        Parameters
        ----------
        shape
            Shape of the tensor.
        step
            Shape of a box; at least one on every axis.
        count
            Number of boxes on each axis.
        """
        axes = [
            np.array([min(p * s, n) for p in range(c)], np.int64)
            for n, s, c in zip(shape, step, count, strict=True)
        ]
        columns = (prod(count), len(shape))
        offsets = np.empty((*count, len(shape)), np.int64)
        for axis, starts in enumerate(np.ix_(*axes)):
            offsets[..., axis] = starts
        offsets = offsets.reshape(columns)
        return cls(shape, offsets, np.minimum(step, np.array(shape, np.int64) - offsets))

    @cached_property
    def grid(self) -> tuple[Shape, Shape] | None:
        """Step and count of the grid that `of_grid` makes the same tiling of; None if of none."""
        if self.is_whole:
            return tuple(max(n, 1) for n in self.shape), (1,) * len(self.shape)
        if not len(self):
            return None
        step = tuple(max(n, 1) for n in self.sizes.max(axis=0).tolist())
        seen = tuple((self.offsets.max(axis=0) // step + 1).tolist())
        counts = [seen]
        for axis in range(len(seen)):  # empty regions at the end of one axis
            others = prod(seen[:axis] + seen[axis + 1 :])
            counts.append((*seen[:axis], len(self) // others, *seen[axis + 1 :]))
        for count in counts:
            if prod(count) == len(self):
                found = Tiling.of_grid(self.shape, step, count)
                same = np.array_equal(found.offsets, self.offsets)
                if same and np.array_equal(found.sizes, self.sizes):
                    return step, count
        return None

    @property
    def ends(self) -> NDArray[np.int64]:
        """One past the last element of each region on each axis."""
        return self.offsets + self.sizes

    @cached_property
    def is_whole(self) -> bool:
        """Whether it is one region, which is the whole tensor."""
        one = len(self) == 1 and not self.offsets.any()
        return one and tuple(self.sizes[0].tolist()) == self.shape

    def __len__(self) -> int:
        """Return the number of regions."""
        return len(self.offsets)

    def __iter__(self) -> Iterator[Region]:
        """Iterate over the regions in their order."""
        for offsets, sizes in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            yield Region(tuple(offsets), tuple(sizes))

    def without_empty(self) -> Tiling:
        """Return the tiling without regions that hold no element."""
        keep = (self.sizes > 0).all(axis=1)
        return self if keep.all() else Tiling(self.shape, self.offsets[keep], self.sizes[keep])

    def check(self, fqn: str) -> None:
        """Raise unless every element lies in exactly one region.

        In bounds, without overlap, and of the right volume together: that is a tiling.

        Raises
        ------
        LayoutError
            With the name of the tensor and what is wrong.
        """
        if self._fault is not None:
            raise LayoutError(
                f"The plan does not cover tensor {fqn!r} of shape {self.shape} exactly once: "
                f"{self._fault}.",
                fqn=fqn,
            )

    @cached_property
    def _fault(self) -> str | None:
        """What is wrong with the regions."""
        if self.is_whole:
            return None
        if len(self) > MAX_REGIONS:
            return f"{len(self)} regions are more than {MAX_REGIONS}"
        shape = np.array(self.shape, np.int64)
        outside = (self.offsets < 0) | (self.sizes < 0) | (self.ends > shape)
        if outside.any():
            culprit = list(self)[int(outside.any(axis=1).argmax())]
            return f"region {culprit} reaches outside the tensor"
        regions = self.without_empty()
        if pair := _overlap(regions):
            first, second = (list(regions)[i] for i in pair)
            return f"regions {first} and {second} overlap"
        covered = sum(map(prod, regions.sizes.tolist()))
        if covered != prod(self.shape):
            found = f"the regions hold {covered} elements, the tensor {prod(self.shape)}"
            return f"{found}; do all its ranks take part in the save?"
        return None


def _overlap(regions: Tiling) -> tuple[int, int] | None:
    """Return two regions that share an element, or None.

    Regions sorted along one axis can only meet those that start before they end. Axes are tried
    by their number of distinct starts, so that the candidates are few.
    """
    if len(regions) < 2:  # noqa: PLR2004
        return None
    if not regions.shape:
        return 0, 1
    starts, ends = regions.offsets, regions.ends
    axis = max(range(starts.shape[1]), key=lambda a: len(np.unique(starts[:, a])))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.searchsorted(starts[:, axis], ends[:, axis]) - np.arange(len(order))
    for distance in range(1, int(reach.max())):
        first = np.flatnonzero(reach > distance)
        second = first + distance
        meet = (starts[first] < ends[second]) & (starts[second] < ends[first])
        if (hits := np.flatnonzero(meet.all(axis=1))).size:
            return int(order[first[hits[0]]]), int(order[second[hits[0]]])
    return None


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor cut into equal boxes; those at the far edges may overhang the tensor.

    Examples
    --------
    >>> grid = Grid(shape=(10, 4), step=(3, 4))
    >>> grid.counts, str(grid.box((3, 0)))
    ((4, 1), '[9:10, 0:4]')
    """

    shape: Shape
    """Shape of the tensor, in elements."""
    step: Shape
    """Shape of a box, in elements; at least one on every axis."""

    @property
    def counts(self) -> Shape:
        """Number of boxes on each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.step, strict=True))

    def box(self, coordinates: Shape) -> Region:
        """Return one box, clipped to the tensor."""
        offsets = tuple(c * s for c, s in zip(coordinates, self.step, strict=True))
        clipped = zip(offsets, self.step, self.shape, strict=True)
        return Region(offsets, tuple(min(s, n - o) for o, s, n in clipped))

    def touched(self, region: Region) -> Region:
        """Return, in grid coordinates, the boxes that share an element with `region`."""
        starts = tuple(o // s for o, s in zip(region.offsets, self.step, strict=True))
        if not region.volume:
            return Region(starts, (0,) * len(starts))
        ends = tuple(-(-e // s) for e, s in zip(region.ends, self.step, strict=True))
        return Region(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def inside(self, region: Region) -> Region:
        """Return, in grid coordinates, the boxes that lie wholly within `region`.

        What of a box overhangs the tensor does not count.
        """
        starts = tuple(-(-o // s) for o, s in zip(region.offsets, self.step, strict=True))
        ends = tuple(
            -(-n // s) if e == n else e // s
            for e, s, n in zip(region.ends, self.step, self.shape, strict=True)
        )
        sizes = tuple(max(e - s, 0) for s, e in zip(starts, ends, strict=True))
        return Region(starts, sizes)

    def insides(self, tiling: Tiling) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what `inside` does for all regions of a tiling: offsets, and sizes.

        Sizes are zero on all axes where a region holds no box.
        """
        shape, step = np.array(self.shape, np.int64), np.array(self.step, np.int64)
        starts = -(-tiling.offsets // step)
        ends = np.where(tiling.ends == shape, -(-shape // step), tiling.ends // step)
        sizes = ends - starts
        return starts, np.where((sizes > 0).all(axis=1, keepdims=True), sizes, 0)


def coordinates(box: Region) -> Iterator[Shape]:
    """Iterate in C order over the elements of a region, as coordinates.

    Examples
    --------
    >>> list(coordinates(Region((1, 5), (2, 1))))
    [(1, 5), (2, 5)]
    """
    return product(*(range(s.start, s.stop) for s in box.slices()))
