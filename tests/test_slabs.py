from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dcp_zarr.slabs import ALIGNMENT, Slab, SlabCursor, plan_slabs

sizes = st.lists(st.integers(1, 20_000), max_size=40)


def placed(writers, expected):
    """Have each writer place its sizes, given what it was expected to take."""
    largest = [max(each, default=0) for each in writers]
    rows = plan_slabs(expected, largest, [len(each) for each in writers])
    slabs = [Slab.of(row) for row in rows]
    cursors = [SlabCursor(slab) for slab in slabs]
    return slabs, [[c.take(n) for n in each] for c, each in zip(cursors, writers, strict=True)]


@given(st.lists(sizes, min_size=1, max_size=6), st.data())
def test_no_byte_has_two_writers(writers, data):
    expected = [data.draw(st.integers(0, 2 * sum(each))) for each in writers]
    _, offsets = placed(writers, expected)
    spans = sorted(
        (offset, offset + n)
        for of_writer, each in zip(offsets, writers, strict=True)
        for offset, n in zip(of_writer, each, strict=True)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(st.lists(sizes, min_size=1, max_size=6))
def test_slabs_begin_at_whole_pages_of_their_own(writers):
    slabs, _ = placed(writers, [sum(each) for each in writers])
    used = [slab for slab in slabs if slab.count]
    assert all(slab.range(k)[0] % ALIGNMENT == 0 for slab in used for k in range(3))
    ranges = sorted(slab.range(k) for slab in used for k in range(3))
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))


@given(st.lists(sizes, min_size=1, max_size=6))
def test_what_was_expected_follows_without_holes_but_for_the_pages_end(writers):
    _, offsets = placed(writers, [sum(each) for each in writers])
    for of_writer, each in zip(offsets, writers, strict=True):
        ends = [offset + n for offset, n in zip(of_writer, each, strict=True)]
        assert of_writer[1:] == ends[:-1]
        assert not each or ends[-1] - of_writer[0] == sum(each)


@given(st.lists(st.integers(100, 1_000), min_size=50, max_size=400), st.floats(0.5, 1))
def test_more_than_was_expected_wastes_a_sixteenth_and_what_does_not_fit(each, part):
    _, (offsets,) = placed([each], [int(sum(each) * part)])
    rounds = 17
    assert offsets[-1] + each[-1] <= sum(each) + rounds * max(each) + sum(each) // 16 + ALIGNMENT


def test_slabs_follow_from_the_plan_alone():
    once, again = (plan_slabs([5, 7], [5, 7], [1, 1]).tolist() for _ in range(2))
    assert once == again
