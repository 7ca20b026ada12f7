"""How the values of a tensor are distributed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dcp_zarr
from dcp_zarr import engine
from dcp_zarr.dtypes import TABLE
from tests import ranks
from tests.ranks import parts
from tests.test_dtypes import DTYPES, every_pattern

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def histogram_of(tensor, path="x.zarr", bins=64, **options):
    dcp_zarr.save({"w": tensor}, path, **options)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        return checkpoint["w"].histogram(bins)


def test_counts_and_edges_are_those_of_numpy(path):
    torch.manual_seed(0)
    whole = torch.randn(3001, 257)
    ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": p} for p in parts(whole, (3, 1))])
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        found = checkpoint["w"].histogram(bins=50)
    counts, edges = np.histogram(whole.double().numpy(), 50)
    assert found.counts == tuple(counts.tolist())
    assert found.edges == pytest.approx(edges)
    assert (found.fqn, found.nans, found.infs) == ("w", 0, 0)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_a_histogram(name):
    source = every_pattern(name)
    values = TABLE[name].values(source.view(torch.uint8).numpy().view(TABLE[name].bits))
    if name == "complex32":
        values = values.astype("f4").view("c8")
    with np.errstate(all="ignore"):
        values = (np.abs(values) if "complex" in name else values).astype(np.float64)
    finite = values[np.isfinite(values)]
    found = histogram_of(source)
    assert sum(found.counts) == finite.size
    assert (found.nans, found.infs) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert (found.edges[0], found.edges[-1], len(found.edges)) == (finite.min(), finite.max(), 65)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), torch.tensor([math.nan, math.inf])])
def test_nothing_finite_has_no_bins(tensor):
    found = histogram_of(tensor)
    assert (found.edges, found.counts, found.nans + found.infs) == ((), (), tensor.numel())
    assert repr(found).startswith("Histogram 'w': 0 finite values, ")


@pytest.mark.parametrize("value", [0.0, -3.5, 1e300])
def test_a_constant_has_one_bin(value):
    found = histogram_of(torch.full((7,), value, dtype=torch.float64))
    assert (found.edges, found.counts) == ((value, value), (7,))


def test_values_too_near_each_other_for_bins_have_one():
    near = [1.0, math.nextafter(1, 2)]
    found = histogram_of(torch.tensor(near, dtype=torch.float64))
    assert (found.edges, found.counts) == (tuple(near), (2,))


def test_a_range_that_float64_does_not_hold_has_bins():
    found = histogram_of(torch.tensor([-1.7e308, 1.0, 1.7e308], dtype=torch.float64), bins=3)
    assert found.counts == (1, 1, 1)
    assert found.edges[0] == -found.edges[-1] == -1.7e308


def test_a_single_value_without_axes():
    assert histogram_of(torch.tensor(3)).counts == (1,)


def test_what_is_not_finite_is_counted_beside_the_bins():
    found = histogram_of(torch.tensor([0.0, 1.0, math.nan, -math.inf, math.inf]), bins=2)
    assert (found.counts, found.nans, found.infs) == ((1, 1), 1, 2)
    assert repr(found) == ("Histogram 'w': 2 finite values from 0 to 1 |██|, 1 NaN, 2 infinite")


@pytest.mark.parametrize("bins", [0, True, 2.5, 65_537])
def test_a_number_of_bins_that_cannot_be(bins):
    expected = f"bins={bins!r} is not a whole number of at least 1 and at most 65536"
    with pytest.raises(dcp_zarr.OptionError, match=expected):
        histogram_of(torch.ones(1), bins=bins)


def test_memory_is_bounded(monkeypatch):
    dcp_zarr.save({"w": torch.rand(4000, 3000)}, "x.zarr")
    seen = []
    real = engine.ReadJob

    def noted(array, codec, region, out):
        seen.append(out.nbytes)
        return real(array, codec, region, out)

    monkeypatch.setattr(engine, "ReadJob", noted)
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        checkpoint["w"].histogram()
    assert max(seen) <= 8 << 20
    assert sum(seen) == 2 * 4000 * 3000 * 4


def test_values_of_two_bytes_are_read_once(monkeypatch):
    dcp_zarr.save({"w": torch.rand(1000, 301).bfloat16()}, "x.zarr")
    seen = []
    real = engine.read
    monkeypatch.setattr(engine, "read", lambda *args: seen.append(1) or real(*args))
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        assert sum(checkpoint["w"].histogram().counts) == 301_000
    assert len(seen) == 1
