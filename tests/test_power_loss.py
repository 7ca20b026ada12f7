"""The power fails at any moment of a save: one of the two checkpoints is there, whole."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr import SaveError, commit
from dcp_zarr.containers import hdf5_assembly
from tests import ranks
from tests.power_loss import Disk, Killed, left_overs, materialise

WAYS = pytest.mark.parametrize(
    ("path", "way"),
    [
        ("x.zarr", "exchange"),
        ("x.zarr", "two renames"),
        ("x.zarr.zip", "one rename"),
        ("x.h5", "one rename"),
    ],
)
"""How a container takes the place of an older one."""


def state(step):
    """Return states with other keys, shapes and grids for odd and even steps."""
    rows = torch.arange(50 * 40.0).reshape(50, 40) + step
    if step % 2:
        return {"a": rows, "gone": torch.full((3,), float(step)), "step": step, "t": (step,)}
    return {"a": rows.t().bfloat16(), "b": torch.full((2,), float(step)), "step": step}


def save(step, path, **options):
    """Save as two pretend ranks, so that there are pieces and objects to stage."""
    whole = state(step)
    tensors = {k: v for k, v in whole.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in whole.items() if k not in tensors}
    halves = {k: ranks.parts(v, (2,) + (1,) * (v.ndim - 1)) for k, v in tensors.items()}
    states = [{k: v[0] for k, v in halves.items()}, {k: v[1] for k, v in halves.items()} | rest]
    options = {"thread_count": 1, "read_chunk_bytes": 1500, "compression": None, **options}
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)


def step_at(path):
    """Return the step of the checkpoint at a path, all of whose values are right; or None."""
    try:
        found = dcp_zarr.load(path)
    except (dcp_zarr.CheckpointNotFoundError, dcp_zarr.IncompleteCheckpointError):
        return None
    assert str(found) == str(state(found["step"]))
    return found["step"]


@pytest.fixture
def folder():
    """Return a folder in memory: nothing here is to survive a real loss of power."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def wrong_left_overs(disk, path, folder, allowed, done, start=0):
    """Return which remainders hold no allowed step, and the number of all."""
    wrong, count = [], 0
    for end, found in left_overs(disk, path, start):
        tried = folder / str(count)
        count += 1
        tried.mkdir()
        materialise(found, tried)
        try:
            step = step_at(tried / path)
        except Exception as error:  # noqa: BLE001  whatever it is, it is wrong
            step = error
        if step not in (done if end == len(disk.acts) else allowed):
            wrong.append((end, step))
        elif count % 50 == 0:  # and another save works
            save(3, tried / path)
            assert step_at(tried / path) == 3
            assert [p.name for p in (tried / path).parent.iterdir()] == [Path(path).name]
        shutil.rmtree(tried)
    return wrong, count


def recorded(disk, path, steps, **options):
    with disk.recorded():
        for step in steps:
            save(step, disk.root / path, **options)
    assert disk.found() == Disk(disk.root).found()  # nothing was done unseen


@WAYS
def test_a_loss_of_power_leaves_one_of_the_two(path, folder, way, monkeypatch):
    if way == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    (folder / "disk").mkdir()
    save(1, folder / "disk" / path)
    disk = Disk(folder / "disk")
    recorded(disk, path, [2])
    wrong, count = wrong_left_overs(disk, path, folder, {1, 2}, {2})
    assert not wrong
    assert count > 100


def test_a_first_save_is_durable_with_the_directories_made_for_it(path, folder):
    (folder / "disk").mkdir()
    disk = Disk(folder / "disk")
    recorded(disk, f"runs/a/{path}", [2])
    wrong, _ = wrong_left_overs(disk, f"runs/a/{path}", folder, {None, 2}, {2})
    assert not wrong


@WAYS
def test_a_save_killed_before_the_loss_of_power_takes_nothing_away(path, folder, way, monkeypatch):
    if way == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    whole = folder / "whole"
    whole.mkdir()
    save(1, whole / path)
    rehearsal = Disk(whole)
    recorded(rehearsal, path, [2])
    swaps = [n for n, act in enumerate(rehearsal.acts, 1) if (0, path) in places(act)]
    assert swaps
    for alive in swaps:
        shutil.rmtree(whole)
        whole.mkdir()
        save(1, whole / path)
        disk = Disk(whole, alive=alive)
        with disk.recorded(), pytest.raises(Killed):
            save(2, whole / path)
        disk.alive = None
        recorded(disk, path, [3])
        wrong, count = wrong_left_overs(disk, path, folder, {1, 2, 3}, {3}, alive)
        assert not wrong
        assert count > 100


def places(act):
    return [change[:2] for change in getattr(act, "changes", ())]


class SeenFile(io.FileIO):
    """A file of Python's that is written through functions of `os`."""

    def write(self, content):
        written = os.pwrite(self.fileno(), content, self.tell())
        self.seek(written, os.SEEK_CUR)
        return written

    def truncate(self, size):
        os.ftruncate(self.fileno(), size)


def test_an_hdf5_file_whose_data_had_to_be_copied_is_durable_too(folder, monkeypatch):
    def misplaced(*_):
        raise hdf5_assembly.MisplacedError("elsewhere")

    def seen(path, mode, buffering):
        return SeenFile(path, mode, opener=lambda *given: os.open(*given))

    monkeypatch.setattr(hdf5_assembly, "in_place", misplaced)
    monkeypatch.setattr(hdf5_assembly, "open", seen, raising=False)
    (folder / "disk").mkdir()
    save(1, folder / "disk" / "x.h5")
    disk = Disk(folder / "disk")
    recorded(disk, "x.h5", [2])
    wrong, _ = wrong_left_overs(disk, "x.h5", folder, {1, 2}, {2})
    assert not wrong


@WAYS
def test_a_swap_that_was_taken_back_takes_nothing_away(path, folder, way, monkeypatch):
    if way == "two renames":
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    (folder / "disk").mkdir()
    save(1, folder / "disk" / path)
    disk = Disk(folder / "disk")

    def fail(found):
        if found == folder / "disk":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(commit, "sync_directory", fail)
    with disk.recorded(), pytest.raises(SaveError, match="Input/output error"):
        save(2, folder / "disk" / path)
    monkeypatch.undo()
    wrong, _ = wrong_left_overs(disk, path, folder, {1, 2}, {1, 2})
    assert not wrong


def test_without_syncs_a_loss_of_power_does_harm(path, folder):
    (folder / "disk").mkdir()
    save(1, folder / "disk" / path)
    disk = Disk(folder / "disk")
    recorded(disk, path, [2], sync_files=False)
    wrong, _ = wrong_left_overs(disk, path, folder, {1, 2}, {2})
    assert wrong
