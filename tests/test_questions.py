"""Questions about a checkpoint of a job that is over, each answered in a line of the README's."""

from __future__ import annotations

import math

import pytest
import torch

import dcp_zarr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two checkpoints of a small model with its optimizer, the newer with some damage in it."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    layers = {
        f"layers.{n}.{name}.weight": torch.randn(8, 8).bfloat16()
        for n in range(4)
        for name in ("attn", "mlp")
    }
    model = {"embed.weight": torch.randn(20, 8).bfloat16(), **layers}
    moments = {f"{fqn}.exp_avg": torch.randn(value.shape) for fqn, value in model.items()}
    state = {"model": model, "optim": {"state": moments, "lr": 3e-4}, "step": 900}
    dcp_zarr.save(state, folder / "step-900.zarr")
    model["layers.2.mlp.weight"][3, 4] = math.nan
    model["layers.1.attn.weight"] = model["layers.1.attn.weight"] * 2
    model["layers.0.mlp.weight"][5, 6] = 77
    model["embed.weight"][[3, 11]] = 0
    dcp_zarr.save({**state, "step": 1000}, folder / "step-1000.h5")
    return folder


@pytest.fixture
def old(runs):
    with dcp_zarr.open_checkpoint(runs / "step-900.zarr") as opened:
        yield opened


@pytest.fixture
def new(runs):
    with dcp_zarr.open_checkpoint(runs / "step-1000.h5") as opened:
        yield opened


def test_how_many_parameters(new):
    assert new.select("model").params == 20 * 8 + 8 * 64


def test_which_step_and_learning_rate(new):
    assert (new.objects["step"], new.objects["optim.lr"]) == (1000, 3e-4)


def test_which_tensors_hold_nan(new):
    found = [row.fqn for row in new.stats() if row.nans]
    assert found == ["model.layers.2.mlp.weight"]


def test_the_largest_weight_and_where(new):
    row = new.select("model").stats().sorted_by("abs_max")[0]
    assert (row.fqn, row.abs_max, row.abs_max_at) == ("model.layers.0.mlp.weight", 77, (5, 6))


def test_what_moved_most_since_step_900(old, new):
    row = old.select("model.layers").diff(new.select("model.layers")).sorted_by("relative_norm")[0]
    assert row.fqn in ("model.layers.0.mlp.weight", "model.layers.1.attn.weight")


def test_what_did_not_move_at_all(old, new):
    assert len(old.diff(new).where(lambda row: row.change == "equal")) == 9 + 5


def test_dead_rows_of_the_embedding(new):
    rows = new["model.embed.weight"].numpy().astype("f4")
    assert (rows == 0).all(axis=1).nonzero()[0].tolist() == [3, 11]


def test_how_large_the_optimizer_state_is(new):
    assert new.select("optim").nbytes == 4 * (20 * 8 + 8 * 64)


def test_is_every_byte_intact(new):
    assert new.verify() == []


def test_are_two_checkpoints_the_same(old):
    assert all(row.change == "equal" for row in old.diff(old))


def test_layers_0_to_3(runs):
    loaded = dcp_zarr.load(runs / "step-1000.h5", "model.layers.*", flat=True)
    assert len(loaded) == 8


def test_what_dtypes_there_are(new):
    rows = {(total.part, total.dtype, total.tensors) for total in new.totals()}
    assert rows == {("model", "bfloat16", 9), ("optim", "float32", 9)}


def test_how_well_it_is_compressed(new):
    assert 0 < new.stored_nbytes <= 1.2 * new.nbytes


def test_the_shape_of_a_tensor(new):
    assert new["model.embed.weight"].shape == (20, 8)


def test_the_first_numbers_of_a_tensor(new, old):
    assert torch.equal(new["model.layers.3.mlp.weight"][:2], old["model.layers.3.mlp.weight"][:2])


def test_which_layer_has_the_largest_spread(new):
    row = new.select("model.layers").stats().sorted_by("std")[0]
    assert row.fqn == "model.layers.0.mlp.weight"


def test_which_names_there_are(new):
    assert list(new.select("model.layers.0")) == [
        "model.layers.0.attn.weight",
        "model.layers.0.mlp.weight",
    ]


def test_which_rank_wrote_what(new):
    assert str(new["model.embed.weight"].regions) == "[Region(offsets=(0, 0), sizes=(20, 8))]"


def test_was_anything_added_or_removed(old, new):
    assert not old.diff(new).where(lambda row: row.change in ("added", "removed"))


def test_is_there_a_checkpoint_at_all(runs):
    assert dcp_zarr.is_complete(runs / "step-900.zarr")
    assert not dcp_zarr.is_complete(runs / "step-901.zarr")
