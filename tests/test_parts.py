"""Millions of parts as columns of numbers say what one after the other says."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_zarr
from dcp_zarr.layout import ArrayLayout, Assignment
from dcp_zarr.parts import RankParts, by_tensor
from dcp_zarr.pieces import find_pieces, staged_nbytes
from dcp_zarr.placement import fingerprints
from dcp_zarr.plan_words import RankItems
from dcp_zarr.region import Region, Tiling
from tests import ranks
from tests.test_region import random_cuts

boxes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), boxes), min_size=1, max_size=4))
def test_the_parts_of_a_tensor_keep_the_order_of_ranks_and_items(ranks):
    axes = {fqn: len(next(r[fqn] for r in ranks if fqn in r)) for r in ranks for fqn in r}
    given_parts = [[(f, (box + [(1, 1)] * 9)[: axes[f]]) for f, box in r.items()] for r in ranks]
    columns = [
        RankParts.of(
            [fqn for fqn, _ in of_rank],
            [tuple(offset for offset, _ in box) for _, box in of_rank],
            [tuple(size for _, size in box) for _, box in of_rank],
        )
        for of_rank in given_parts
    ]
    found = by_tensor(columns)
    flat = [(rank, *part) for rank, of_rank in enumerate(given_parts) for part in of_rank]
    assert found.keys() == {fqn for _, fqn, _ in flat}
    for fqn, parts in found.items():
        rows = [row for row, (_, other, _) in enumerate(flat) if other == fqn]
        assert parts.rows.tolist() == rows
        assert parts.ranks.tolist() == [flat[row][0] for row in rows]
        both = np.stack([parts.offsets, parts.sizes], axis=-1).tolist()
        assert both == [[list(pair) for pair in flat[row][2]] for row in rows]


@given(st.data())
def test_pieces_begin_where_the_rank_staged_them(data):
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    step = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    regions = random_cuts(data.draw, Region.whole(shape), depth=3)
    ranks = [data.draw(st.integers(0, 2)) for _ in regions]
    array = ArrayLayout("w", "w", shape, 2, step, step)
    of_ranks = [[r for r, k in zip(regions, ranks, strict=True) if k == rank] for rank in range(3)]
    columns = [
        RankParts.of(["w"] * len(mine), [r.offsets for r in mine], [r.sizes for r in mine])
        for mine in of_ranks
    ]
    parts = by_tensor(columns)
    tilings = {"w": Tiling(shape, parts["w"].offsets, parts["w"].sizes)}
    found = dict(find_pieces({"w": array}, tilings, parts, [*map(len, of_ranks)]))
    expected = {}
    for rank, mine in enumerate(of_ranks):
        offset = 0
        for region in mine:
            inside = offset
            for piece in Assignment(array, region).pieces():
                expected.setdefault(piece.read_chunk, []).append((rank, inside, piece.region))
                inside += piece.region.volume * 2 + 4
            offset += staged_nbytes(Assignment(array, region))
            assert inside == offset
    told = {
        read_chunk: [(piece.rank, piece.offset, piece.region) for piece in pieces]
        for read_chunk, pieces in found.get("w", {}).items()
    }
    assert told == expected


def test_a_fingerprint_differs_where_one_number_does():
    def of(offsets=(4, 0), sizes=(2, 3), layout=7, slab=(0, 1, 2, 3, 4, 5)):
        parts = RankParts.of(["w"], [offsets], [sizes])
        return fingerprints(parts, np.array([layout], np.uint64), np.array([slab])).item()

    changed = [
        of(),
        of(offsets=(0, 4)),
        of(sizes=(3, 2)),
        of(offsets=(2, 3), sizes=(4, 0)),
        of(layout=8),
        of(slab=(1, 0, 2, 3, 4, 5)),
        of(slab=(0, 1, 2, 3, 4, 6)),
    ]
    assert len(set(changed)) == len(changed)
    assert of() == of()


def planned_by_one_rank():
    whole = {"a": torch.zeros(4, 6), "b": torch.zeros(8)}
    state = {fqn: ranks.parts(tensor, (2, 1)[: tensor.ndim])[0] for fqn, tensor in whole.items()}
    plan = ranks.SavePlanner(state | {"object": (1, 2), "c": torch.zeros(3)}).create_local_plan()
    return dcp_zarr.ZarrStorageWriter("x.zarr").prepare_local_plan(plan)


def test_what_a_rank_read_of_its_items_arrives_with_them():
    plan = pickle.loads(pickle.dumps(planned_by_one_rank()))
    read = plan.storage_data.read
    assert read.only([item.tensor_data for item in plan.items if item.tensor_data]) is read
    kept = [item for item in plan.items if item.index.fqn in "ac"]
    some = read.only([item.tensor_data for item in kept])
    expected = RankItems.of(kept)
    assert some.parts.fqns == expected.parts.fqns == ["a", "c"]
    for column in ("axes", "offsets", "sizes"):
        assert (getattr(some.parts, column) == getattr(expected.parts, column)).all()
    assert (some.kinds == expected.kinds).all()
    assert (some.described, some.boxes) == (expected.described, expected.boxes)


def test_what_a_rank_read_says_nothing_of_other_items():
    plan = planned_by_one_rank()
    other = replace(plan.items[0].tensor_data)  # equal, but it may be of another tensor
    read = plan.storage_data.read
    assert read.only([other]) is None
    assert read.only([item.tensor_data for item in plan.items[::-1]]) is None


@pytest.mark.parametrize("others", [{}, {"object": 1}], ids=["alone", "with an object"])
def test_a_planner_that_renames_after_the_ranks_planned_is_refused(others):
    class Renaming(ranks.SavePlanner):
        def lookup_object(self, index):
            return self.state_dict["a"]

    state = {"a": torch.zeros(3), **others}
    writer = dcp_zarr.ZarrStorageWriter("x.zarr")
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(ranks.SavePlanner(state).create_local_plan())
    renamed = replace(local.items[0], index=replace(local.items[0].index, fqn="z"))
    (plan,) = writer.prepare_global_plan([replace(local, items=[renamed, *local.items[1:]])])
    with pytest.raises(dcp_zarr.SaveError, match="'a' was planned, but 'z' is to be written"):
        writer.write_data(plan, Renaming(state)).wait()
