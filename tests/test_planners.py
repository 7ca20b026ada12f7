"""What `SafeLoadPlanner` refuses, before anything is read."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_zarr
from dcp_zarr import SafeLoadPlanner
from dcp_zarr.errors import TensorMismatchError, TensorNotFoundError, UnsafeObjectError


@pytest.fixture(autouse=True)
def _checkpoint(_in_temporary_directory, path):
    state = {"m": {"weight": torch.ones(2, 3)}, "step": 7, "code": (io.StringIO,), "gone": 1}
    dcp_zarr.save(state, path)


def failure(path, state, planner):
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=dcp_zarr.storage_reader(path), planner=planner, no_dist=True)
    return next(iter(caught.value.failures.values()))[0]


def test_missing_names_come_with_what_is_near(path):
    error = failure(path, {"m": {"wieght": torch.zeros(2, 3)}}, SafeLoadPlanner("m"))
    assert isinstance(error, TensorNotFoundError)
    assert str(error) == (
        "The checkpoint and the state dict differ. Missing in the checkpoint: 'm.wieght' (near: "
        "'m.weight'). Not wanted by the state dict: 'm.weight'. Pass strict=False to load the rest."
    )


def test_many_missing_names_are_counted(path):
    state = {"m": {f"w{n}": torch.zeros(1) for n in range(10)}}
    assert "Missing in the checkpoint: 10, such as 'm.w0'" in str(
        failure(path, state, SafeLoadPlanner("m"))
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": torch.zeros(1)}, "'step' is an object in the checkpoint, but a tensor in the"),
        ({"m": {"weight": 1}}, "'m.weight' is a tensor in the checkpoint, but an object in the"),
        (
            {"m": {"weight": torch.zeros(3, 2)}},
            "Tensor 'm.weight' is (2, 3) in the checkpoint, but the state dict wants (3, 2). A",
        ),
    ],
)
def test_other_kinds_and_sizes_are_refused(state, message, path):
    error = failure(path, state, SafeLoadPlanner(strict=False))
    assert isinstance(error, TensorMismatchError)
    assert str(error).startswith(message)


def test_an_object_never_replaces_a_tensor_in_dcps_own_planner_either(path):
    error = failure(path, {"step": torch.zeros(1)}, None)
    assert isinstance(error, TensorMismatchError)
    assert f"'step' is an object in {path!r}, but a tensor in the state dict" in str(error)


def test_objects_run_no_code(path):
    planner = SafeLoadPlanner(strict=False)
    assert isinstance(failure(path, {"code": None}, planner), UnsafeObjectError)
    state = {"code": None, "step": 0}
    planner = SafeLoadPlanner(strict=False, weights_only=False)
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path), planner=planner, no_dist=True)
    assert state == {"code": (io.StringIO,), "step": 7}
    assert planner.report.unexpected == ("m.weight", "gone")
