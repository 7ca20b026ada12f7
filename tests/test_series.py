"""The checkpoints of a run, side by side."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr import engine


def saved(step, name, **options):
    state = {"m": {"w": torch.full((3,), float(step)), "b": torch.zeros(2)}, "step": step}
    dcp_zarr.save(state, name, **options)


def test_a_series_is_in_the_order_of_numbers_whatever_the_container():
    for step, suffix in ((10, "zarr"), (9, "h5"), (100, "zarr.zip"), (2, "zarr")):
        saved(step, f"step-{step}.{suffix}")
    with dcp_zarr.series("step-*") as run:
        assert [checkpoint.objects["step"] for checkpoint in run] == [2, 9, 10, 100]
        assert (len(run), run.steps) == (4, [2, 9, 10, 100])
        assert run[1:3].steps == [9, 10]
        assert repr(run[4:]) == "CheckpointSeries of 0"
        assert repr(run) == "CheckpointSeries of 4, from 'step-2.zarr' to 'step-100.zarr.zip'"


def test_a_trace_has_a_row_for_each_checkpoint_and_tensor():
    for step in (1, 2):
        saved(step, f"step-{step}.zarr")
    with dcp_zarr.series("step-*.zarr") as run:
        table = run.trace("mean")
        rows = [(point.checkpoint, point.step, point.fqn, point.value) for point in table]
        assert [point.value for point in run.trace("std", "m.w")] == [0, 0]
    assert rows == [
        ("step-1.zarr", 1, "m.w", 1.0),
        ("step-1.zarr", 1, "m.b", 0.0),
        ("step-2.zarr", 2, "m.w", 2.0),
        ("step-2.zarr", 2, "m.b", 0.0),
    ]
    assert repr(table).startswith("mean of all tensors\ncheckpoint ")


def test_stored_statistics_make_a_trace_without_a_read(monkeypatch, path):
    suffix = path.removeprefix("x")
    for step in (1, 2):
        saved(step, f"run-{step}{suffix}", statistics=True)

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(engine, "read", refuse)
    with dcp_zarr.series(Path(f"run-*{suffix}")) as run:
        assert [point.value for point in run.trace("max", "m.w")] == [1, 2]


def test_a_name_without_a_number_has_its_place_as_step():
    for name in ("7/b.zarr", "7/a.h5", "7/c-3.zarr"):
        Path("7").mkdir(exist_ok=True)
        saved(1, name)
    with dcp_zarr.series("7/*") as run:
        assert [Path(checkpoint.path).name for checkpoint in run] == ["a.h5", "b.zarr", "c-3.zarr"]
        assert run.steps == [0, 1, 3]


def test_a_tensor_that_came_later_is_traced_from_then_on():
    saved(1, "s-1.zarr")
    dcp_zarr.save({"new": torch.ones(1), "nan": torch.tensor(math.nan)}, "s-2.zarr")
    with dcp_zarr.series("s-*") as run:
        assert [point.step for point in run.trace("norm", "new")] == [2]
        assert math.isnan(run.trace("mean", "nan")[0].value)
        with pytest.raises(dcp_zarr.TensorNotFoundError, match="Nothing in 's-2.zarr' is named"):
            run.trace("norm", "old")


def test_a_statistic_that_is_none_is_refused():
    saved(1, "s-1.zarr")
    with dcp_zarr.series("s-*") as run:
        for name in ("sdt", "fqn", "abs_max_at"):
            expected = (
                f"no statistic '{name}'; there are count, nans, infs, zeros, min, max, mean, std, "
                "norm, abs_max"
            )
            with pytest.raises(dcp_zarr.OptionError, match=expected):
                run.trace(name)


def test_nothing_matched_is_told():
    with pytest.raises(dcp_zarr.CheckpointNotFoundError, match=r"No path matches 'x/step-\*.zarr'"):
        dcp_zarr.series("x/step-*.zarr")


def test_what_is_no_checkpoint_is_told_and_nothing_stays_open():
    saved(1, "s-1.zarr")
    Path("s-2.zarr").write_text("no checkpoint")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(dcp_zarr.FormatError, match="s-2.zarr"):
        dcp_zarr.series("s-*")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_series_is_closed():
    saved(1, "s-1.zarr")
    before = len(os.listdir("/proc/self/fd"))
    with dcp_zarr.series("s-*"):
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before
