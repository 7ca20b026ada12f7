"""The examples train, are killed, and go on with the same state on another number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dcp_zarr
from tests.launching import Launched

EXAMPLES = Path(__file__).parents[1] / "examples"
SAVED, KILLED = 4, 7
"""Steps: the newest checkpoint's, and the last one that is printed before the kill."""
ROUNDING = 1e-3
"""Other ranks sum in another order."""

TRAINERS = [
    pytest.param("ddp.py", 2, 3, "step-{}.zarr", id="ddp"),
    pytest.param("fsdp2_tp.py", 4, 2, "step-{}.zarr", id="fsdp2_tp"),
]


def bits(path):
    """Return every value of a checkpoint, tensors as bits."""
    values = dcp_zarr.load(path, flat=True, weights_only=False)
    return {
        name: (str(v.dtype), v.shape, v.flatten().view(torch.uint8).tolist())
        if isinstance(v, torch.Tensor)
        else v
        for name, v in values.items()
    }


@pytest.mark.dist
@pytest.mark.parametrize(("script", "count", "other_count", "name"), TRAINERS)
def test_a_killed_run_goes_on_with_the_same_state(tmp_path, script, count, other_count, name):
    script, run = EXAMPLES / script, tmp_path / "run"
    killed = Launched(count, tmp_path, script, "run", "--steps", "10000").kill_after(KILLED)
    newest = run / name.format(SAVED)
    for later in set(run.iterdir()) - {newest}:  # what it saved until it felt the kill
        shutil.rmtree(later)
    saved = bits(newest)

    # No step is left to make: what was loaded is saved again, from what is running.
    Launched(other_count, tmp_path, script, "run", "--steps", str(SAVED)).finish()
    again = bits(newest)
    assert again.keys() == saved.keys()
    assert [fqn for fqn in saved if again[fqn] != saved[fqn]] == []

    went_on = Launched(other_count, tmp_path, script, "run", "--steps", str(KILLED)).finish()
    assert went_on == pytest.approx({step: killed[step] for step in went_on}, rel=ROUNDING)
    assert list(went_on) == list(range(SAVED + 1, KILLED + 1))
