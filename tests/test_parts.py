"""Millions of parts as columns of numbers say what one after the other says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_zarr.layout import ArrayLayout, Assignment
from dcp_zarr.parts import RankParts, by_tensor
from dcp_zarr.pieces import find_pieces, staged_nbytes
from dcp_zarr.placement import fingerprints
from dcp_zarr.region import Region, Tiling
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
