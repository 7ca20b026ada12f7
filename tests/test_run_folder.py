"""The checkpoints of a run, as a trainer finds them when it begins again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr import checkpoints, commit, latest
from dcp_zarr.errors import OptionError
from tests import ranks


def save(step, path):
    dcp_zarr.save({"w": torch.full((2,), float(step))}, path)


def begin_save(path):
    """Save up to where everything but the commit is done."""
    writer = dcp_zarr.storage_writer(path)
    planners, plans, _ = ranks.plan([writer], [{"w": torch.ones(2)}])
    writer.write_data(plans[0], planners[0]).wait()
    return writer


def test_the_latest_is_the_one_of_the_highest_step_whatever_the_container():
    for step, suffix in ((9, "zarr"), (10, "h5"), (100, "zarr.zip"), (8, "zarr")):
        save(step, f"runs/step-{step}.{suffix}")
    assert latest("runs") == "runs/step-100.zarr.zip"
    names = ["step-8.zarr", "step-9.zarr", "step-10.h5", "step-100.zarr.zip"]
    assert checkpoints(Path("runs/")) == [f"runs/{name}" for name in names]


def test_steps_go_before_other_parts_of_names_and_names_without_a_step_come_first():
    for path in ("b-2.zarr", "a-10.zarr", "best.zarr", "x3-epoch-1.zarr", "noext"):
        save(0, f"runs/{path}")
    names = [Path(path).name for path in checkpoints("runs")]
    assert names == ["best.zarr", "noext", "x3-epoch-1.zarr", "b-2.zarr", "a-10.zarr"]


def test_where_no_run_began_there_is_none():
    assert latest("runs") is None
    os.mkdir("runs")
    assert (latest("runs"), checkpoints("runs")) == (None, [])


def test_what_is_no_complete_checkpoint_is_passed_over(path, caplog):
    name = path.replace("x", "step-{}", 1)
    save(1, f"runs/{name.format(1)}")
    save(2, f"runs/{name.format(2)}")
    begin_save(f"runs/{name.format(5)}")
    document = Path("runs", name.format(2))
    document = document / "zarr.json" if document.is_dir() else document
    document.write_bytes(document.read_bytes()[:-60])
    os.mkdir("runs/logs-7")
    Path("runs/notes-8.zip").write_text("not a zip file")
    Path("runs/notes-9.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, "dcp_zarr"):
        assert latest("runs") == f"runs/{name.format(1)}"
    assert f"{name.format(2)} is passed over" in caplog.text
    assert checkpoints("runs") == [f"runs/{name.format(1)}"]


def test_a_checkpoint_half_way_through_a_swap_is_found():
    save(3, "runs/step-3.zarr")
    Path("runs/step-3.zarr").rename("runs/.step-3.zarr.old")
    assert latest("runs") == "runs/step-3.zarr"
    assert dcp_zarr.load("runs/step-3.zarr")["w"].tolist() == [3, 3]


def test_a_series_of_a_directory_is_of_its_complete_checkpoints():
    for step in (2, 10):
        save(step, f"runs/step-{step}.zarr")
    begin_save("runs/step-11.zarr")
    with dcp_zarr.series("runs") as run:
        assert run.steps == [2, 10]
        assert run[-1]["w"][0].item() == 10
    with dcp_zarr.series("runs/step-10.zarr") as run:
        assert run.steps == [10]


def test_only_what_is_needed_is_opened_for_the_latest(reads):
    for step in (1, 2, 3):
        save(step, f"runs/step-{step}.zarr")
    reads.clear()
    assert latest("runs") == "runs/step-3.zarr"
    assert [name for name, nbytes in reads if nbytes == 0] == ["zarr.json"]


def test_names_of_hidden_siblings_are_known():
    path = Path("runs/.odd..name.zarr")
    made = commit.LocalCommit(path)
    for hidden in (made.partial, made.old, made._committing):
        assert commit.shown_name(hidden.name) == path.name
    assert commit.shown_name(f".{path.name}.stale-0123abcd") == path.name
    for other in (path.name, "x.partial", ".partial", ".x.stale-1", ".x.old.zarr"):
        assert commit.shown_name(other) is None


@pytest.mark.parametrize("path", ["runs/", Path("runs"), "./runs"])
def test_a_directory_may_be_written_in_any_way(path):
    save(1, "runs/step-1.zarr")
    assert Path(latest(path)) == Path("runs/step-1.zarr")


def test_a_file_is_no_directory_of_checkpoints():
    Path("x.pt").touch()
    with pytest.raises(OptionError, match="'x.pt' is a file, not a directory"):
        latest("x.pt")
