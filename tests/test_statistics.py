"""What the values of tensors are like, and how they differ between checkpoints."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_zarr
from dcp_zarr import engine, value_sums
from dcp_zarr.dtypes import dtype_of
from tests import ranks
from tests.ranks import parts
from tests.test_dtypes import DTYPES, every_pattern

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def stats_of(tensor, path="x.zarr", **options):
    dcp_zarr.save({"w": tensor}, path, **options)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        (found,) = checkpoint.stats()
    return found


def test_statistics_are_those_of_numpy(path):
    torch.manual_seed(0)
    whole = torch.randn(3001, 257)
    ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": p} for p in parts(whole, (3, 1))])
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        (found,) = checkpoint.stats()
    values = whole.double().numpy()
    assert (found.fqn, found.dtype, found.shape) == ("w", "float32", (3001, 257))
    assert (found.count, found.zeros, found.nans, found.infs) == (values.size, 0, 0, 0)
    expected = [values.min(), values.max(), values.mean(), values.std()]
    assert [found.min, found.max, found.mean, found.std] == pytest.approx(expected)
    assert found.norm == pytest.approx(np.linalg.norm(values))
    assert found.abs_max == np.abs(values).max()
    assert found.abs_max_at == np.unravel_index(np.abs(values).argmax(), values.shape)


@pytest.mark.parametrize("name", [name for name in DTYPES if "complex" not in name])
def test_every_dtype_has_statistics(name):
    source = every_pattern(name)
    found = stats_of(source)
    values = (source.view(torch.uint8) if name == "float4_e2m1fn_x2" else source).double()
    finite = values[values.isfinite()]
    assert (found.nans, found.infs) == (int(values.isnan().sum()), int(values.isinf().sum()))
    assert (found.min, found.max) == (finite.min(), finite.max())


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_values_count_by_their_size(name):
    found = stats_of(torch.tensor([3 + 4j, 0, 6 - 8j], dtype=getattr(torch, name)))
    assert (found.min, found.max, found.zeros, found.abs_max_at) == (0, 10, 1, (2,))


def test_what_is_not_finite_is_counted_and_left_out():
    found = stats_of(torch.tensor([0.0, -0.0, 3.0, -4.0, math.nan, math.inf, -math.inf]))
    assert (found.nans, found.infs, found.zeros) == (1, 2, 2)
    assert (found.min, found.max, found.norm) == (-4, 3, 5)
    assert (found.abs_max, found.abs_max_at) == (4, (3,))


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), torch.full((2,), math.nan)])
def test_nothing_finite_has_no_mean(tensor):
    found = stats_of(tensor)
    assert math.isnan(found.mean)
    assert math.isnan(found.min)
    assert found.abs_max_at is None


@given(st.lists(st.floats(-1e3, 1e3), max_size=60), st.integers(1, 60))
def test_parts_sum_up_to_the_whole(values, cut):
    array = np.array(values, np.float64)

    def sums(part, start):
        box = dcp_zarr.Region((start,), (part.size,))
        return value_sums.sums_of(part.view(np.uint64), dtype_of("float64"), box, array.shape)

    whole = sums(array, 0)
    joined = value_sums.joined([sums(array[:cut], 0), sums(array[cut:], min(cut, array.size))])
    assert (joined.finite, joined.zeros) == (whole.finite, whole.zeros)
    assert joined.mean == pytest.approx(whole.mean, abs=1e-9)
    assert joined.squares == pytest.approx(whole.squares, abs=1e-6)
    assert (joined.abs_max, joined.abs_max_at) == (whole.abs_max, whole.abs_max_at)


@pytest.mark.parametrize("offset", [0, 1, 1e9])
@pytest.mark.parametrize("count", [1, 5, 8192, 32768, 100_001])
def test_a_spread_far_from_zero_is_not_lost(offset, count):
    values = offset + np.random.default_rng(0).integers(-2, 3, count).astype(np.float64)
    found = stats_of(torch.from_numpy(values))
    assert found.std == pytest.approx(values.std(), rel=1e-9)
    assert found.norm == pytest.approx(np.linalg.norm(values), rel=1e-9)


def test_values_at_the_end_of_float64_have_a_mean():
    found = stats_of(torch.tensor([1.5e308, 1.7e308, 1.6e308], dtype=torch.float64))
    assert found.mean == pytest.approx(1.6e308)
    assert (found.min, found.max, found.norm) == (1.5e308, 1.7e308, math.inf)


def test_of_equal_values_the_first_has_the_place(path):
    whole = torch.zeros(1000, 301).bfloat16()
    whole[700, 3] = whole[699, 300] = -2
    whole[999, 0] = 2
    assert stats_of(whole, path, read_chunk_bytes=4096).abs_max_at == (699, 300)


def test_values_that_are_stored_as_bits_are_numbers_all_the_same(path):
    values = torch.tensor([-1.5, 2.0]).bfloat16()
    found = stats_of(values, path, dtype_encoding="bits")
    assert (found.min, found.max) == (-1.5, 2)


def test_memory_is_bounded(monkeypatch):
    dcp_zarr.save({"w": torch.zeros(4000, 3000)}, "x.zarr")
    seen = []
    real = engine.ReadJob

    def noted(array, codec, region, out):
        seen.append(out.nbytes)
        return real(array, codec, region, out)

    monkeypatch.setattr(engine, "ReadJob", noted)
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        checkpoint.stats()
    assert max(seen) <= 8 << 20
    assert sum(seen) == 4000 * 3000 * 4


class TestDiff:
    """How tensors differ."""

    def diff(self, old, new, second="y.zarr"):
        dcp_zarr.save(old, "x.zarr")
        dcp_zarr.save(new, second)
        with dcp_zarr.open_checkpoint("x.zarr") as a, dcp_zarr.open_checkpoint(second) as b:
            return {row.fqn: row for row in a.diff(b)}

    def test_equal_bits_are_equal_whatever_the_container(self, path):
        state = {"w": torch.randn(1000, 70), "nan": torch.tensor([math.nan, -0.0])}
        found = self.diff(state, state, f"y{path}")
        assert {row.change for row in found.values()} == {"equal"}
        assert found["w"].cosine == pytest.approx(1)
        assert found["w"].relative_norm == 0

    def test_values_that_are_stored_as_bits_differ_as_numbers(self):
        state = {"w": torch.tensor([1.0, math.nan]).bfloat16()}
        dcp_zarr.save(state, "x.zarr", dtype_encoding="bits")
        dcp_zarr.save(state, "y.zarr")
        with dcp_zarr.open_checkpoint("x.zarr") as a, dcp_zarr.open_checkpoint("y.zarr") as b:
            (row,) = a.diff(b)
        assert (row.change, row.differing) == ("equal", 0)

    def test_values_that_differ_are_measured(self):
        old = torch.randn(300, 40)
        new = old.clone()
        new[7, 3] += 2
        row = self.diff({"w": old}, {"w": new})["w"]
        assert (row.change, row.differing) == ("values", 1)
        assert row.max_abs == pytest.approx(2)
        assert row.relative_norm == pytest.approx(2 / float(old.norm()), rel=1e-5)
        assert 0.9 < row.cosine < 1

    def test_names_shapes_and_dtypes_that_differ_are_told(self):
        old = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
        new = {
            "b": torch.ones(3),
            "c": torch.ones(2).half(),
            "d": torch.ones(2),
            "e": torch.ones(1),
        }
        found = self.diff(old, new)
        changes = {fqn: row.change for fqn, row in found.items()}
        assert changes == {
            "a": "removed", "b": "shape", "c": "dtype", "d": "equal", "e": "added"
        }  # fmt: skip
        assert (found["b"].was, found["b"].now) == ("float32 [2]", "float32 [3]")
        assert (found["c"].differing, found["c"].max_abs) == (0, 0)

    def test_names_may_be_compared_without_a_prefix(self):
        dcp_zarr.save({"model": {"w": torch.ones(2), "b": torch.ones(1)}}, "x.zarr")
        dcp_zarr.save({"w": torch.ones(2), "c": torch.ones(1)}, "y.zarr")
        with dcp_zarr.open_checkpoint("x.zarr") as a, dcp_zarr.open_checkpoint("y.zarr") as b:
            found = a.diff(b, names=lambda fqn: fqn.removeprefix("model."))
        assert {row.fqn: row.change for row in found} == {
            "w": "equal", "model.b": "removed", "c": "added"
        }  # fmt: skip
        message = "'model.w' and 'model.b' would both be compared as 'x': change names"
        with pytest.raises(dcp_zarr.OptionError, match=message):
            a.diff(b, names=lambda _: "x")

    def test_a_zero_of_another_sign_differs(self):
        row = self.diff({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})["w"]
        assert (row.change, row.differing, row.max_abs) == ("values", 1, 0)

    @pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float64", "complex64", "complex128"])
    def test_one_element_that_differs_is_one_at_any_width(self, dtype):
        old = torch.ones(4, dtype=getattr(torch, dtype))
        new = old.clone()
        new[2] = 1 + 1j if old.is_complex() else 2
        assert self.diff({"w": old}, {"w": new})["w"].differing == 1


class TestParts:
    """Views of a part, totals and tables."""

    @staticmethod
    def opened():
        state = {"model": {"w": torch.ones(4, 2).bfloat16(), "b": torch.ones(3)}, "step": 7}
        dcp_zarr.save({**state, "optim": {"m": torch.zeros(4, 2)}}, "x.zarr")
        return dcp_zarr.open_checkpoint("x.zarr")

    def test_a_selection_is_a_checkpoint_of_less(self):
        part = self.opened().select("model")
        assert list(part) == ["model.w", "model.b"]
        assert (part.params, len(part.objects)) == (11, 0)
        assert [row.fqn for row in part.stats()] == ["model.w", "model.b"]
        assert "optim" not in str(part.tree())
        with pytest.raises(dcp_zarr.TensorNotFoundError, match="Near it: 'model"):
            self.opened().select("modle")

    def test_totals_are_by_part_and_dtype(self):
        rows = [(t.part, t.dtype, t.tensors, t.elements, t.nbytes) for t in self.opened().totals()]
        assert rows == [
            ("model", "bfloat16", 1, 8, 16),
            ("model", "float32", 1, 3, 12),
            ("optim", "float32", 1, 8, 32),
        ]

    def test_a_table_is_text_html_and_pandas(self):
        table = self.opened().stats()
        assert "model.w" in repr(table)
        assert "<td>bfloat16</td>" in table._repr_html_()
        frame = table.to_pandas()
        assert list(frame["zeros"]) == [0, 0, 8]
        assert table.sorted_by("zeros")[0].fqn == "optim.m"
        with pytest.raises(dcp_zarr.OptionError, match="no column 'size'; there are fqn, dtype"):
            table.sorted_by("size")

    def test_a_name_that_is_html_stays_text(self):
        dcp_zarr.save({"<script>": torch.ones(1)}, "x.zarr")
        assert "<script>" not in dcp_zarr.open_checkpoint("x.zarr").stats()._repr_html_()


class TestProgress:
    """How far the reading is, on standard error, where a person sees it."""

    PROGRAM = """
import dcp_zarr
with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
    rows = [row.fqn for row in checkpoint.stats(progress={progress})]
assert rows == ["a", "b"], rows
"""

    def shown(self, *, progress, terminal):
        dcp_zarr.save({"a": torch.ones(2), "b": torch.ones(2)}, "x.zarr")
        mine, theirs = pty.openpty() if terminal else os.pipe()
        program = [sys.executable, "-c", self.PROGRAM.format(progress=progress)]
        done = subprocess.run(program, check=True, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        with open(mine, "rb", buffering=0) as stderr:
            try:
                text = stderr.read(65536)
            except OSError:  # a terminal that nobody has open has nothing more to say
                text = b""
        assert done.stdout == b""
        return text.decode()

    def test_it_is_shown_when_asked_for_in_a_terminal(self):
        assert "100%" in self.shown(progress=True, terminal=True)

    def test_it_is_not_shown_elsewhere(self):
        assert self.shown(progress=True, terminal=False) == ""
        assert self.shown(progress=False, terminal=True) == ""
