"""A save appears whole or not at all, and replaces only what is ours."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr import commit
from dcp_zarr.containers.directory_source import DirectorySource
from dcp_zarr.errors import (
    CheckpointExistsError,
    CorruptionError,
    IncompleteCheckpointError,
    OptionError,
    SaveError,
)
from tests import ranks

REPOSITORY = Path(__file__).parents[1]


def save(value=1.0, path="x.zarr", **options):
    state = {"w": torch.full((3,), value), "k": {f"{value}": torch.ones(2)}}
    writer = dcp_zarr.storage_writer(path, **options)
    return ranks.save(lambda: writer, [{"w": state["w"], f"k{value}": torch.ones(2)}])


def test_overwriting_leaves_nothing_of_the_old():
    save(1.0)
    save(0.0)
    assert sorted(dcp_zarr.open_checkpoint("x.zarr")) == ["k0.0", "w"]
    assert not dcp_zarr.load("x.zarr")["w"].any()
    assert sorted(os.listdir("x.zarr")) == ["k0", "w", "zarr.json"]
    assert os.listdir() == ["x.zarr"]


def test_overwrite_false_refuses():
    save()
    with pytest.raises(CheckpointExistsError, match="Checkpoint already exists at '.*x.zarr'"):
        save(overwrite=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.write_text("mine"),
        lambda p: (p.mkdir(), (p / "thesis.tex").write_text("mine")),
        lambda p: (
            p.mkdir(),
            (p / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}'),
        ),
        lambda p: (
            p.mkdir(),
            (p / "zarr.json").write_text("garbage"),
            (p / "t").write_text("mine"),
        ),
    ],
    ids=["file", "directory", "other zarr", "damaged zarr"],
)
def test_what_is_not_ours_is_never_replaced(make):
    path = Path("x.zarr")
    make(path)
    before = {p: p.stat().st_mtime_ns for p in [path, *path.rglob("*")]}
    with pytest.raises(
        CheckpointExistsError, match="is not a dcp_zarr checkpoint in a .*; nothing was written"
    ):
        save()
    assert {p: p.stat().st_mtime_ns for p in [path, *path.rglob("*")]} == before
    assert os.listdir() == ["x.zarr"]


def test_an_empty_directory_may_be_saved_into():
    Path("x.zarr").mkdir()
    save()
    assert "w" in dcp_zarr.open_checkpoint("x.zarr")


def test_a_symbolic_link_stays_a_link():
    Path("real").mkdir()
    Path("x.zarr").symlink_to("real")
    save()
    assert Path("x.zarr").is_symlink()
    assert Path("real/zarr.json").exists()


def unfinished_save(value=1.0, path="x.zarr"):
    writer = dcp_zarr.storage_writer(path)
    planners, plans, metadata = ranks.plan([writer], [{"w": torch.full((3,), value)}])
    results = [writer.write_data(plans[0], planners[0]).wait()]
    return lambda: writer.finish(metadata, results)


def test_a_save_that_never_finished_is_said_to_be_so(path):
    unfinished_save(path=path)
    with pytest.raises(
        IncompleteCheckpointError, match=f"never finished; what it wrote is in '.*.{path}.partial'"
    ):
        dcp_zarr.open_checkpoint(path)


def test_of_two_saves_to_one_path_the_one_that_began_first_is_given_up(path):
    finish_first = unfinished_save(1.0, path)
    finish_second = unfinished_save(2.0, path)
    with pytest.raises(SaveError, match=f"Another save to '.*{path}' began"):
        finish_first()
    finish_second()
    assert (dcp_zarr.load(path)["w"] == 2).all()


def test_a_straggler_of_a_dead_save_writes_where_nobody_looks():
    writer = dcp_zarr.ZarrStorageWriter("x.zarr")
    _, plans, _ = ranks.plan([writer], [{"w": torch.ones(3)}])
    sink = writer._new_target().open_sink(0)
    save(2.0)
    array = plans[0].storage_data.layouts[0]
    with pytest.raises(FileNotFoundError):
        sink.place(array, (0,), [((0,), [b"late"])])
    sink.close()
    assert (dcp_zarr.load("x.zarr")["w"] == 2).all()


def test_a_checkpoint_replaced_while_it_is_read_gives_the_old_or_an_error():
    save(1.0)
    checkpoint = dcp_zarr.open_checkpoint("x.zarr")
    save(2.0)
    with pytest.raises(
        CorruptionError, match="because the checkpoint was replaced while it was read"
    ):
        checkpoint["w"][...]


def test_ranks_that_see_other_saves_do_not_mix_them(path):
    save(1.0, path)
    reader = dcp_zarr.storage_reader(path)
    reader.read_metadata()
    (plan,) = reader.prepare_global_plan([torch.distributed.checkpoint.LoadPlan([])])
    save(2.0, path)
    other = dcp_zarr.storage_reader(path)
    other.read_metadata()
    with pytest.raises(
        CorruptionError, match="was replaced while it was being loaded: ranks see different"
    ):
        other.read_data(plan, None)


def test_without_an_exchange_readers_find_the_old_one_while_the_name_is_free(monkeypatch):
    save(1.0)
    monkeypatch.setattr(commit, "exchange", lambda *_: False)
    seen = []
    real = Path.rename

    def rename(self, to):
        result = real(self, to)
        seen.append(dcp_zarr.load("x.zarr")["w"][0].item())
        return result

    monkeypatch.setattr(Path, "rename", rename)
    save(2.0)
    assert seen == [1.0, 1.0, 2.0]
    assert os.listdir() == ["x.zarr"]


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("exists", [False, True], ids=["nothing", "a checkpoint"])
def test_a_swap_that_cannot_be_made_durable_is_taken_back(monkeypatch, exchanges, exists, path):
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    if exists:
        save(1.0, path)

    def fail_beside_the_new_one(_):
        if Path(path) in Path().iterdir() and dcp_zarr.load(path)["w"][0] == 2:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(commit, "sync_directory", fail_beside_the_new_one)
    with pytest.raises(SaveError, match="Input/output error"):
        save(2.0, path)
    assert [name for name in os.listdir() if not name.startswith(".")] == [path] * exists
    if exists:
        assert dcp_zarr.load(path)["w"].tolist() == [1, 1, 1]
    monkeypatch.setattr(commit, "sync_directory", lambda _: None)
    save(3.0, path)
    assert os.listdir() == [path]


def test_lost_results_are_noticed(path):
    writer = dcp_zarr.storage_writer(path)
    _, _, metadata = ranks.plan([writer], [{"w": torch.ones(3), "step": 1}])
    with pytest.raises(SaveError, match=r"Tensor 'w' \[0:3\] was written by no rank"):
        writer.finish(metadata, [[]])


def test_files_of_a_rank_that_the_coordinator_does_not_see_are_noticed():
    finish = unfinished_save()
    Path(".x.zarr.partial/w/c.0").unlink()
    with pytest.raises(
        SaveError, match="Rank 0's files are not visible from the coordinator.*is the path shared"
    ):
        finish()


def test_a_rank_that_does_not_see_the_partial_directory_says_so(path):
    writer = dcp_zarr.storage_writer(path)
    planners, plans, _ = ranks.plan([writer], [{"w": torch.ones(3)}])
    shutil.rmtree(f".{path}.partial")
    with pytest.raises(SaveError, match="Rank 0 does not see .* is the path shared by all hosts"):
        writer.write_data(plans[0], planners[0])


def test_files_that_no_rank_wrote_are_noticed():
    finish = unfinished_save()
    Path(".x.zarr.partial/w/c.7").write_bytes(b"stray")
    with pytest.raises(SaveError, match="'c.7' of tensor 'w' .* was written by no rank"):
        finish()


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("x.zarr", "kill"),
        ("x.zarr", "error"),
        ("x.zarr", "rename"),
        ("x.zarr.zip", "kill"),
        ("x.zarr.zip", "error"),
        ("x.h5", "kill"),
        ("x.h5", "error"),
    ],
)
def test_a_failure_at_any_operation_leaves_one_of_the_two_checkpoints(path, mode, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash", mode, str(tmp_path), path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout.split()[0])
    assert points > 30


def test_a_job_that_begins_during_the_last_check_of_another_is_not_committed(monkeypatch, path):
    save(1.0, path)
    finish_first = unfinished_save(2.0, path)
    real = commit.LocalCommit.check_unchanged

    def check_then_lose(self):
        real(self)
        unfinished_save(3.0, path)

    monkeypatch.setattr(commit.LocalCommit, "check_unchanged", check_then_lose)
    with pytest.raises((SaveError, FileNotFoundError)):
        finish_first()
    assert (dcp_zarr.load(path)["w"] == 1).all()


def test_a_swap_that_broke_off_is_completed_before_anything_is_decided(path):
    save(1.0, path)
    Path(path).rename(f".{path}.old")
    with pytest.raises(CheckpointExistsError, match="already exists"):
        save(2.0, path, overwrite=False)
    assert (dcp_zarr.load(path)["w"] == 1).all()


def test_left_overs_of_dead_saves_go_with_the_next_save(path):
    unfinished_save(path=path)
    Path(f".{path}.stale-0").mkdir()
    Path(f".{path}.commit").mkdir()
    save(1.0, path)
    assert os.listdir() == [path]


def test_a_writer_removes_what_its_failed_save_left(path):
    writer = dcp_zarr.storage_writer(path)
    ranks.plan([writer], [{"w": torch.ones(3)}])
    assert Path(f".{path}.partial").exists()
    writer.reset(f"y-{path}")
    ranks.plan([writer], [{"w": torch.ones(3)}])
    assert sorted(os.listdir()) == [f".y-{path}.partial"]


@pytest.mark.parametrize(
    ("path", "message"),
    [("x" * 240, "has a name of more than 230 bytes"), ("/proc", "mount point")],
)
def test_paths_that_cannot_be_swapped_are_refused(path, message):
    with pytest.raises(OptionError, match=message):
        dcp_zarr.save({"w": torch.ones(1)}, path)


def test_a_reader_that_was_pickled_open_opens_again_or_says_why_not(path):
    save(1.0, path)
    tensor = dcp_zarr.open_checkpoint(path)["w"]
    again = pickle.loads(pickle.dumps(tensor))
    assert again[...].tolist() == [1, 1, 1]
    pickled = pickle.dumps(tensor)
    save(2.0, path)
    with pytest.raises(CorruptionError, match="was replaced since it was opened"):
        pickle.loads(pickled)


def test_a_checkpoint_replaced_while_it_is_opened_is_opened_again(monkeypatch):
    save(1.0)
    real = DirectorySource._read_root
    lost = []

    def read_root(self, commit):
        if not lost:
            lost.append(1)
            save(2.0)
        return real(self, commit)

    monkeypatch.setattr(DirectorySource, "_read_root", read_root)
    assert dcp_zarr.load("x.zarr")["w"].tolist() == [2, 2, 2]


def test_a_checkpoint_that_is_committed_while_it_is_looked_for_is_opened(monkeypatch, path):
    real = Path.exists
    asked = []

    def exists(self, **options):
        there = real(self, **options)
        if self == Path(path) and not asked:
            asked.append(there)
            save(1.0, path)
        return there

    monkeypatch.setattr(Path, "exists", exists)
    assert dcp_zarr.load(path)["w"].tolist() == [1, 1, 1]
    assert asked == [False]
