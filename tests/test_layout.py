from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_zarr.dtypes import DType, bits_dtype
from dcp_zarr.layout import Assignment
from dcp_zarr.layout_rules import (
    MAX_READ_CHUNK_BYTES,
    MIN_READ_CHUNK_BYTES,
    LayoutOptions,
    plan_layouts,
)
from dcp_zarr.region import Region, Tiling, coordinates
from tests.ranks import even, grid

MIB = 1 << 20


def layout_of(shape, parts, itemsize=2, **options):
    tiling = Tiling.of(shape, grid(shape, parts))
    dtype = DType("any", "any", itemsize, 0, bits_dtype(1))
    layouts = plan_layouts({"w": tiling}, {"w": dtype}, {"w": "w"}, LayoutOptions(**options))
    return layouts["w"], [Assignment(layouts["w"], region) for region in tiling]


def pieces_part(assignments):
    return sum(a.pieces_nbytes for a in assignments) / assignments[0].array.nbytes


@pytest.mark.parametrize(
    ("shape", "parts", "read", "write"),
    [
        ((4096, 4096), (8, 1), (128, 4096), (512, 4096)),
        ((4096, 4096), (1, 8), (1024, 512), (4096, 512)),
        ((4096, 4096), (2, 8), (1024, 512), (4096, 4096)),
        ((4096, 4096), (1, 1), (128, 4096), (4096, 4096)),
        ((50257, 768), (4, 2), (1795, 384), (12565, 384)),
        ((8, 1024, 1024), (1, 1, 1), (1, 512, 1024), (8, 1024, 1024)),
        ((), (), (), ()),
        ((0, 4), (1, 1), (1, 4), (1, 4)),
    ],
)
def test_aligned_regions_need_no_pieces(shape, parts, read, write):
    array, assignments = layout_of(shape, parts)
    assert (array.read_chunk_shape, array.write_chunk_shape) == (read, write)
    assert not any(a.pieces_nbytes for a in assignments)


def test_ten_rows_on_four_ranks_start_at_multiples_of_three():
    array, assignments = layout_of((10, 65536), (4, 1), itemsize=4)
    assert (array.read_chunk_shape[0], array.write_chunk_shape[0]) == (3, 12)
    assert [a.read_chunks.volume > 0 for a in assignments] == [True] * 4


def test_a_prime_step_is_cut_into_whole_rows_with_few_pieces():
    array, assignments = layout_of((32003, 4096), (8, 1))
    assert (array.read_chunk_shape, array.write_chunk_shape) == ((128, 4096), (32128, 4096))
    assert 0 < pieces_part(assignments) < 1 / 8


def test_a_small_tensor_with_several_writers_is_one_cut_read_chunk():
    array, assignments = layout_of((4,), (4,), itemsize=4)
    assert array.read_chunk_shape == (4,)
    assert pieces_part(assignments) == 1


def test_many_ranks_get_small_read_chunks_rather_than_pieces():
    array, assignments = layout_of((4096, 4096), (1024, 1))
    assert array.read_chunk_shape == (4, 4096)
    assert not any(a.pieces_nbytes for a in assignments)


def test_pieces_beyond_the_budget_of_the_save_are_avoided():
    array, assignments = layout_of((32003, 4096), (8, 1), pieces_bytes=MIB)
    assert (array.read_chunk_shape, array.write_chunk_shape) == ((1, 4096), (4001, 4096))
    assert not any(a.pieces_nbytes for a in assignments)


def test_write_chunks_stay_within_their_limit():
    array, _ = layout_of((250_000, 1024), (1, 1), itemsize=4, write_chunk_bytes=64 * MIB)
    assert prod(array.write_chunk_shape) * 4 <= 64 * MIB


@given(st.data())
def test_every_element_is_in_one_read_chunk_of_one_writer(data):
    axes = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(axes))
    parts = tuple(data.draw(st.integers(1, 6)) for _ in range(axes))
    wanted = data.draw(st.sampled_from([1, 16, 64, 4096]))
    # Small sizes make small tensors behave as large ones do.
    array, assignments = layout_of(shape, parts, itemsize=1024, read_chunk_bytes=wanted * 1024)
    writers: dict = {}
    for number, assignment in enumerate(assignments):
        for read_chunk in coordinates(assignment.read_chunks):
            assert writers.setdefault(read_chunk, number) == number
        for piece in assignment.pieces():
            assert writers.setdefault(piece.read_chunk, "coordinator") == "coordinator"
        staged = sum(piece.region.volume for piece in assignment.pieces())
        assert staged * 1024 == assignment.pieces_nbytes
    assert writers.keys() == set(coordinates(Region.whole(array.read_grid.counts)))


@given(st.tuples(st.integers(1, 60_000), st.integers(1, 6_000)), st.integers(1, 64))
def test_read_chunks_of_row_regions_have_a_good_size(shape, ranks):
    array, assignments = layout_of(shape, (ranks, 1))
    whole = prod(shape) * 2 <= MIN_READ_CHUNK_BYTES
    nbytes = array.read_chunk_nbytes
    assert nbytes <= MAX_READ_CHUNK_BYTES
    assert whole or nbytes >= 4096 or pieces_part(assignments) <= 1


def test_a_mesh_of_odd_sizes_makes_few_files():
    """5,461 rows, cut in two and again in four, of half a row each: g is 1."""
    shape, boxes = (5461, 4096), []
    for start, rows in even(shape[0], 2):
        for offset, part in even(rows, 4):
            for column in (0, 2048):
                boxes.append(Region((start + offset, column), (part, 2048)))
    dtype = DType("any", "any", 2, 0, bits_dtype(1))
    tiling = Tiling.of(shape, boxes)
    array = plan_layouts({"w": tiling}, {"w": dtype}, {"w": "w"}, LayoutOptions())["w"]
    assert array.write_grid.counts == (1, 1)
    assignments = [Assignment(array, box) for box in boxes]
    assert pieces_part(assignments) < 1 / 8


@pytest.mark.parametrize("shape", [(0, 2**63 - 1), (2**62, 0), (0, 10**6, 10**9)])
def test_a_tensor_without_elements_may_have_any_shape(shape):
    array, _ = layout_of(shape, (1,) * len(shape))
    assert array.read_chunk_shape == (1,) * len(shape)
