from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_zarr.errors import LayoutError
from dcp_zarr.region import MAX_REGIONS, Grid, Region, Tiling, coordinates


def boxes(axes):
    axis = st.tuples(st.integers(0, 12), st.integers(0, 12))
    return st.lists(axis, min_size=axes, max_size=axes).map(
        lambda pairs: Region(tuple(o for o, _ in pairs), tuple(s for _, s in pairs))
    )


def elements(region):
    return set(coordinates(region))


@given(boxes(2), boxes(2))
def test_an_intersection_holds_the_elements_of_both(one, other):
    assert elements(one.intersection(other)) == elements(one) & elements(other)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)), st.tuples(st.integers(1, 5), st.integers(1, 5))
)
def test_a_grid_is_a_tiling(shape, step):
    grid = Grid(shape, step)
    boxes = [grid.box(c) for c in coordinates(Region.whole(grid.counts))]
    Tiling.of(shape, boxes).check("w")


@given(st.data())
def test_a_grid_knows_which_boxes_a_region_touches_and_which_it_holds(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    step = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    sizes = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, starts, strict=True)]
    region = Region(tuple(starts), tuple(sizes))
    grid = Grid(shape, step)
    everywhere = list(coordinates(Region.whole(grid.counts)))
    touched = [c for c in everywhere if grid.box(c).intersection(region).volume]
    inside = [c for c in touched if grid.box(c).intersection(region) == grid.box(c)]
    assert list(coordinates(grid.touched(region))) == touched
    assert list(coordinates(grid.inside(region))) == inside


def random_cuts(draw, region, depth):
    """Cut a box again and again: a tiling that need not be a grid."""
    axis = draw(st.integers(0, len(region.sizes) - 1))
    if depth == 0 or region.sizes[axis] < 2:
        return [region]
    at = draw(st.integers(1, region.sizes[axis] - 1))
    left, right = list(region.sizes), list(region.sizes)
    left[axis], right[axis] = at, region.sizes[axis] - at
    start = list(region.offsets)
    start[axis] += at
    halves = Region(region.offsets, tuple(left)), Region(tuple(start), tuple(right))
    return [box for half in halves for box in random_cuts(draw, half, depth - 1)]


@given(st.data())
def test_any_tiling_passes_and_any_part_of_it_fails(data):
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    regions = random_cuts(data.draw, Region.whole(shape), depth=4)
    regions = data.draw(st.permutations(regions))
    Tiling.of(shape, regions).check("w")
    with pytest.raises(LayoutError, match="elements"):
        Tiling.of(shape, regions[1:]).check("w")
    with pytest.raises(LayoutError, match="overlap"):
        Tiling.of(shape, [*regions, regions[0]]).check("w")


@given(st.data())
def test_boxes_inside_all_regions_are_found_as_those_inside_each(data):
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    step = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    regions = random_cuts(data.draw, Region.whole(shape), depth=4)
    grid = Grid(shape, step)
    starts, sizes = grid.insides(Tiling.of(shape, regions))
    for region, offsets, counts in zip(regions, starts.tolist(), sizes.tolist(), strict=True):
        inside = grid.inside(region)
        if inside.volume:
            assert (inside.offsets, inside.sizes) == (tuple(offsets), tuple(counts))
        else:
            assert not any(counts)


def test_a_tensor_without_axes_has_one_region():
    Tiling.of((), [Region((), ())]).check("w")
    with pytest.raises(LayoutError, match="overlap"):
        Tiling.of((), [Region((), ()), Region((), ())]).check("w")


def test_a_region_outside_its_tensor_is_named():
    with pytest.raises(LayoutError, match=r"'w' of shape \(4,\).*region \[2:6\] reaches outside"):
        Tiling.of((4,), [Region((0,), (2,)), Region((2,), (4,))]).check("w")


def test_more_regions_than_the_format_holds_are_refused():
    offsets = np.arange(MAX_REGIONS + 1)[:, None]
    tiling = Tiling((MAX_REGIONS + 1,), offsets, np.ones_like(offsets))
    with pytest.raises(LayoutError, match="1048577 regions are more than 1048576"):
        tiling.check("w")


def test_regions_that_do_not_cover_say_what_is_missing():
    with pytest.raises(LayoutError, match="hold 2 elements, the tensor 4; do all its ranks"):
        Tiling.of((4,), [Region((0,), (2,))]).check("w")
