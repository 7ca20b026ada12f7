"""The examples train, are killed, and go on with the same state on another number of processes."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
import sys
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
    ("ddp.py", 2, 3, "step-{}.zarr", "torch"),
    ("fsdp2_tp.py", 4, 2, "step-{}.zarr", "torch"),
    ("torchtitan_checkpoints.py", 2, 3, "step-{}", "torchtitan"),
    ("accelerate_checkpoints.py", 2, 3, "step-{}.zarr", "accelerate"),
    ("lightning_fsdp2.py", 2, 3, "step-{}.ckpt", "lightning"),
]
"""Script, processes, processes that go on, name of a checkpoint, and what must be installed."""


def bits(path):
    """Return every value of a checkpoint, tensors as bits."""
    values = dcp_zarr.load(path, flat=True, weights_only=False)
    return {
        name: (str(v.dtype), v.shape, v.flatten().view(torch.uint8).tolist())
        if isinstance(v, torch.Tensor)
        else v
        for name, v in values.items()
    }


def marked(script, *others):
    marks = [] if others[-1] == "torch" else [pytest.mark.slow]
    if script == "fsdp2_tp.py" and torch.__version__.startswith("2.7."):
        marks.append(pytest.mark.skip(reason="on another mesh torch 2.7's own resume differs too"))
    return pytest.param(script, *others, id=script, marks=marks)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "count", "other_count", "name", "needs"), [marked(*row) for row in TRAINERS]
)
def test_a_killed_run_goes_on_with_the_same_state(
    tmp_path, script, count, other_count, name, needs
):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not here: pip install --group examples")
    script, run = EXAMPLES / script, tmp_path / "run"
    newest = run / name.format(SAVED)
    first = Launched(count, tmp_path, script, "run", "--steps", "10000")
    killed = first.kill_after(KILLED, when=lambda: dcp_zarr.is_complete(newest))
    for later in set(run.iterdir()) - {newest}:  # what it saved until it was killed
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


@pytest.mark.parametrize("script", ["norms_xarray.py", "norms_dask.py"])
def test_norms_of_all_tensors(script, path):
    torch.manual_seed(0)
    layers = {f"{n}.w": torch.randn(300, 7, dtype=torch.bfloat16) for n in range(3)}
    model = {
        **layers,
        "scale": torch.tensor(-2.0),
        "none": torch.ones(0, 4),
        "id": torch.ones(2).int(),
    }
    dcp_zarr.save({"model": model, "other": torch.ones(3), "step": 7}, path)
    expected = {f"model.{k}": v.double().norm().item() for k, v in model.items() if k != "id"}
    example = runpy.run_path(str(EXAMPLES / script))
    assert example["norms"](path, "model") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("script", ["norms_xarray.py", "norms_dask.py"])
def test_norms_are_printed(script):
    dcp_zarr.save({"w": torch.ones(3), "other": torch.ones(2)}, "x.zarr")
    program = [sys.executable, "-W", "error", str(EXAMPLES / script), "x.zarr", "w"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert shown == "     1.73205  w\n"


def test_dask_reads_a_tensor_in_parts(monkeypatch):
    dcp_zarr.save({"w": torch.ones(1000, 4)}, "x.zarr")
    example = runpy.run_path(str(EXAMPLES / "norms_dask.py"))
    monkeypatch.setitem(example["in_parts"].__globals__, "PART_BYTES", 1600)
    (variable,) = dcp_zarr.open_checkpoint("x.zarr").to_xarray().data_vars.values()
    assert example["in_parts"](variable).chunks == ((100,) * 10, (4,))
    assert example["norms"]("x.zarr") == {"w": pytest.approx(4000**0.5)}
