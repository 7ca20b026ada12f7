"""Singular values of tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dcp_zarr
from dcp_zarr import spectrum
from tests import ranks
from tests.ranks import parts

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def spectrum_of(tensor, path="x.zarr", **options):
    dcp_zarr.save({"w": tensor}, path, **options)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        return checkpoint["w"].spectrum()


def check(found, matrix):
    expected = np.linalg.svd(matrix, compute_uv=False)
    assert found.singular_values == pytest.approx(expected, rel=1e-9, abs=2e-8 * expected[0])
    assert found.norm == pytest.approx(np.linalg.norm(matrix))
    assert found.stable_rank == pytest.approx((np.linalg.norm(matrix) / expected[0]) ** 2)


@pytest.mark.parametrize("shape", [(301, 40), (40, 301), (64, 64), (1, 9), (9, 1)])
def test_singular_values_are_those_of_numpy(shape, path):
    torch.manual_seed(0)
    whole = torch.randn(shape)
    cut = (3, 1) if shape[0] > 2 else (1, 3)
    ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": p} for p in parts(whole, cut)])
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        found = checkpoint["w"].spectrum()
    assert found.fqn == "w"
    check(found, whole.double().numpy())


@pytest.mark.parametrize("shape", [(500, 30), (30, 500), (30, 7, 9, 11), (900, 2, 3, 4), (60, 60)])
def test_parts_add_up_to_the_whole(shape, monkeypatch):
    """A matrix of any form that is read in many panels, each multiplied in many slices."""
    monkeypatch.setattr(spectrum, "_PANEL_BYTES", 5000)
    monkeypatch.setattr(spectrum, "_SLICE_BYTES", 1000)
    torch.manual_seed(0)
    whole = torch.randn(shape)
    check(spectrum_of(whole), whole.double().numpy().reshape(shape[0], -1))


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e5m2", "int16", "bool", "complex32", "complex64", "complex128"]
)
def test_every_kind_of_number_has_a_spectrum(name):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, (20, 12)) + 1j * rng.integers(-2, 2, (20, 12))
    values = values if "complex" in name else values.real
    check(spectrum_of(torch.from_numpy(values).to(getattr(torch, name))), values)


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200])
def test_squares_that_float64_does_not_hold_do_no_harm(scale):
    matrix = scale * np.diag([1.0, 3.0, 2.0])
    found = spectrum_of(torch.from_numpy(matrix))
    assert found.singular_values == pytest.approx((3 * scale, 2 * scale, scale), rel=1e-3)
    assert found.stable_rank == pytest.approx(14 / 9, rel=1e-3)


@pytest.mark.parametrize("shape", [(3, 2), (0, 5), (4, 0)])
def test_zeros_have_no_rank(shape):
    found = spectrum_of(torch.zeros(shape))
    assert (found.singular_values, found.norm) == ((0.0,) * min(shape), 0)
    assert found.stable_rank == 0


def test_a_spectrum_is_a_line():
    found = spectrum_of(torch.diag(torch.tensor([1.0, 2.0])))
    assert repr(found) == (
        "Spectrum 'w': 2 singular values from 2 down to 1, norm 2.236, stable rank 1.25"
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3), r"'w' of shape \(3,\) is no matrix: a spectrum needs two axes or more"),
        (torch.ones(8193, 8193, dtype=torch.bool), "has 8193 singular values; .* at most 8192"),
        (torch.tensor([[math.nan, 1, math.inf]]), "holds 1 NaN and 1 infinite values"),
    ],
    ids=["vector", "large", "nan"],
)
def test_what_has_no_spectrum_is_told(tensor, message):
    with pytest.raises(dcp_zarr.OptionError, match=message):
        spectrum_of(tensor)
