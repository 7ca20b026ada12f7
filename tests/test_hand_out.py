"""What is in a checkpoint, as state dicts and as DCP's `Metadata`."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import dcp_zarr
from dcp_zarr.errors import CorruptionError, UnsafeObjectError

STATE = {
    "model": {"layers": [{"w": torch.arange(6.0).reshape(2, 3)}, {"w": torch.ones(2).bfloat16()}]},
    "step": 7,
    "betas": (0.9, 0.95),
}


@pytest.fixture
def checkpoint(path):
    dcp_zarr.save(STATE, path)
    with dcp_zarr.open_checkpoint(path) as opened:
        yield opened


def test_a_checkpoint_loads_nested_as_it_was_saved(checkpoint):
    assert str(checkpoint.load()) == str(STATE)


def test_a_selection_loads_what_it_selects_and_lists_stay_lists(checkpoint):
    loaded = checkpoint.select("model.layers.1").load()
    assert loaded["model"]["layers"][0] is None
    assert torch.equal(loaded["model"]["layers"][1]["w"], torch.ones(2).bfloat16())


def test_a_selection_loads_flat_by_fqn_in_order(checkpoint):
    assert list(checkpoint.select("model.**").load(flat=True)) == [
        "model.layers.0.w",
        "model.layers.1.w",
    ]
    assert list(checkpoint.load(flat=True)) == [*checkpoint, "step", "betas"]


def test_objects_that_could_run_code_are_loaded_on_request_only(path):
    dcp_zarr.save({"unsafe": pytest.approx, "step": 7}, path)
    checkpoint = dcp_zarr.open_checkpoint(path)
    with pytest.raises(UnsafeObjectError, match="Object 'unsafe' is not loaded"):
        checkpoint.load()
    assert checkpoint.select("step").load() == {"step": 7}
    assert checkpoint.load(weights_only=False) == {"unsafe": pytest.approx, "step": 7}


def test_damage_is_never_handed_out():
    dcp_zarr.save({"w": torch.ones(5), "v": torch.ones(5)}, "x.zarr", compression=None)
    with open("x.zarr/w/c.0", "r+b") as file:
        file.write(b"\xff")
    checkpoint = dcp_zarr.open_checkpoint("x.zarr")
    with pytest.raises(CorruptionError, match=r"Tensor 'w' \[0:5\] in 'x.zarr' cannot be read"):
        checkpoint.load()
    assert list(checkpoint.select("v").load()) == ["v"]


def test_metadata_is_what_dcp_saved(path):
    saved = dcp_zarr.save(STATE, path)
    assert dcp_zarr.open_checkpoint(path).metadata() == saved


def test_metadata_of_a_selection_tells_of_nothing_else(checkpoint):
    metadata = checkpoint.select("betas").metadata()
    assert metadata.state_dict_metadata == {"betas": BytesStorageMetadata()}
    assert metadata.planner_data == {"betas": ("betas",)}
