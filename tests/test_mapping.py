"""The mapping of write items to read chunks is decided before a byte is written, and is true."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from dcp_zarr import ZarrStorageWriter
from dcp_zarr.region import coordinates
from tests import ranks
from tests.ranks import parts

CASES = {
    "rows": ((1024, 512), (4, 1), None),
    "columns": ((1024, 512), (1, 4), "fast"),
    "mesh": ((1024, 512), (2, 2), "fast"),
    "prime rows": ((4001, 100), (8, 1), "small"),
    "small": ((10,), (4,), "fast"),
    "uneven": ((1000, 33), (3, 1), None),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def saved(request):
    """Plan by hand, look, then write: the assignments, the whole tensor, and its document."""
    shape, counts, compression = request.param
    whole = torch.randint(1, 1000, shape).float()
    states = [{"a.w": part} for part in parts(whole, counts)]
    writers = [
        ZarrStorageWriter("x.zarr", compression=compression, read_chunk_bytes=32 << 10)
        for _ in states
    ]
    planners, plans, metadata = ranks.plan(writers, states)
    assert not list(Path("x.zarr").rglob("*"))
    results = [
        w.write_data(p, pl).wait() for w, p, pl in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(metadata, results)
    assignments = [a for plan in plans for a in plan.storage_data.assignments(plan.items)]
    return assignments, whole, json.loads(Path("x.zarr/a/w/zarr.json").read_bytes())


def read_chunk_shape(document):
    codec = document["codecs"][0]
    if codec["name"] == "sharding_indexed":
        return codec["configuration"]["chunk_shape"]
    return document["chunk_grid"]["configuration"]["chunk_shape"]


def test_assignments_name_the_array_and_its_final_grid(saved):
    assignments, whole, document = saved
    for assignment in assignments:
        assert assignment.array.path == "a/w"
        assert list(assignment.array.read_chunk_shape) == read_chunk_shape(document)
        write = document["chunk_grid"]["configuration"]["chunk_shape"]
        assert list(assignment.array.write_chunk_shape) == write
    assert document["shape"] == list(whole.shape)


def test_each_read_chunk_has_one_writer_and_pieces_make_up_the_others(saved):
    assignments, whole, document = saved
    grid = np.zeros(
        [-(-n // c) for n, c in zip(whole.shape, read_chunk_shape(document), strict=True)]
    )
    elements = np.zeros(whole.shape)
    for assignment in assignments:
        for read_chunk in coordinates(assignment.read_chunks):
            grid[read_chunk] += 1
            elements[assignment.array.read_grid.box(read_chunk).slices()] += 1
        for piece in assignment.pieces():
            assert grid[piece.read_chunk] == 0
            elements[piece.region.slices()] += 1
    cut = {piece.read_chunk for assignment in assignments for piece in assignment.pieces()}
    for read_chunk in cut:
        grid[read_chunk] += 1
    assert (grid == 1).all()
    assert (elements == 1).all()


def test_plain_zarr_decodes_exactly_the_assigned_box_from_the_object(saved):
    assignments, whole, _ = saved
    array = zarr.open_array("x.zarr/a/w", mode="r", zarr_format=3)
    for assignment in assignments:
        for read_chunk in coordinates(assignment.read_chunks):
            box = assignment.array.read_grid.box(read_chunk)
            assert box.intersection(assignment.region) == box
            np.testing.assert_array_equal(array[box.slices()], whole[box.slices()].numpy())


def test_a_write_chunk_holds_its_own_read_chunks_alone(saved):
    """Without an object, zarr finds fill values exactly where its write chunk was."""
    assignments, whole, _ = saved
    array = assignments[0].array
    victim = next(iter(coordinates(array.write_grid.touched(assignments[0].region))))
    (Path("x.zarr/a/w") / ".".join(["c", *map(str, victim)])).unlink()
    expected = whole.numpy().copy()
    expected[array.write_grid.box(victim).slices()] = 0
    np.testing.assert_array_equal(zarr.open_array("x.zarr/a/w", mode="r")[...], expected)
