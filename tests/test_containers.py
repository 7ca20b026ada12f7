"""What every container must do, by the same tests for each."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import dcp_zarr
from dcp_zarr import commit, tensors
from tests import ranks
from tests.ranks import Part, grid, parts
from tests.test_dtypes import DTYPES, every_pattern

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def save(path, states, **options):
    return ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)


def mixed_state():
    """Tensors of several writers and one, cut and whole; objects of all kinds."""
    torch.manual_seed(0)
    whole = {
        "m.large": torch.randn(3000, 50),
        "m.cut": torch.randn(1999, 33),
        "m.bias": torch.randn(11),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    objects = {"step": 7, "betas": (0.9, 0.95), "big": list(range(400_000)), "odd/näme": "x"}
    cut = {fqn: parts(whole[fqn], (3,) + (1,) * (whole[fqn].ndim - 1)) for fqn in list(whole)[:3]}
    states = [{fqn: of[rank] for fqn, of in cut.items()} for rank in range(3)]
    states[0] |= {fqn: whole[fqn] for fqn in ("none", "scalar")}
    states[1] |= objects
    return {**whole, **objects}, states


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        if isinstance(value, torch.Tensor):
            np.testing.assert_array_equal(tensors.bits(found[fqn]), tensors.bits(value))
        else:
            assert found[fqn] == value


@pytest.mark.parametrize("compression", [None, "fast", "small", numcodecs.GZip(1)])
@pytest.mark.parametrize("budget", [1, 256 << 20])
def test_what_was_saved_comes_back(place, compression, budget):
    whole, states = mixed_state()
    options = {"read_chunk_bytes": 20_000, "memory_budget_bytes": budget}
    save(place, states, compression=compression, **options)
    assert_equal(dcp_zarr.load(place, flat=True, weights_only=False), whole)
    assert dcp_zarr.open_checkpoint(place).verify() == []
    assert dcp_zarr.is_complete(place)
    assert os.listdir() in ([], ["store"], [place])


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_of_a_dtype_survives(place, name):
    source = every_pattern(name)
    save(place, [{"w": part} for part in parts(source, (3, 1))])
    np.testing.assert_array_equal(tensors.bits(dcp_zarr.load(place)["w"]), tensors.bits(source))


@pytest.mark.parametrize("shape", [(10, 3), (7, 5), (3, 1), (2, 2), (1, 9), (0, 4), (13,), (97, 2)])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 5), (3, 2), (5, 1), (4, 4)])
def test_any_number_of_ranks_loads_what_any_number_saved(place, shape, before, after):
    whole = torch.arange(float(np.prod(shape))).reshape(shape)
    rest = (1,) * (len(shape) - 1)
    save(place, [{"w": part} for part in parts(whole, (before, *rest))])
    target = torch.zeros(shape)
    boxes = grid(shape, (after, *rest))
    states = [{"w": Part(target, box)} for box in boxes]
    ranks.load(dcp_zarr.storage_reader(place), states)
    assert torch.equal(target, whole)


def test_metadata_is_what_the_save_returned(place):
    _, states = mixed_state()
    saved = save(place, states)
    read = dcp_zarr.storage_reader(place).read_metadata()
    assert read.state_dict_metadata == saved.state_dict_metadata
    assert (read.planner_data, read.storage_meta) == (saved.planner_data, saved.storage_meta)


def test_an_overwritten_checkpoint_leaves_nothing_behind(place):
    whole, states = mixed_state()
    save(place, states)
    dcp_zarr.save({"w": torch.zeros(5)}, place)
    assert_equal(dcp_zarr.load(place), {"w": torch.zeros(5)})
    save(place, states)
    assert_equal(dcp_zarr.load(place, flat=True, weights_only=False), whole)
    with pytest.raises(dcp_zarr.CheckpointExistsError, match="already exists"):
        dcp_zarr.save({"w": torch.zeros(5)}, place, overwrite=False)


def test_what_is_not_ours_is_never_replaced(path):
    kinds = [lambda p: p.write_bytes(b"PK precious"), lambda p: p.mkdir() or (p / "x").touch()]
    for make in kinds:
        make(Path(path))
        with pytest.raises(dcp_zarr.CheckpointExistsError, match="is not a dcp_zarr checkpoint"):
            dcp_zarr.save({"w": torch.zeros(5)}, path)
        assert os.listdir() == [path]
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def test_an_open_checkpoint_stays_the_one_that_was_opened(place):
    dcp_zarr.save({"w": torch.ones(500)}, place)
    with dcp_zarr.open_checkpoint(place) as opened:
        dcp_zarr.save({"w": torch.zeros(500)}, place)
        if str(place).endswith((".zip", ".h5")):
            assert (np.asarray(opened["w"]) == 1).all()
        else:  # the old objects are removed
            with pytest.raises(dcp_zarr.CorruptionError, match="was replaced while it was read"):
                np.asarray(opened["w"])


def test_an_opened_checkpoint_can_be_pickled(place):
    dcp_zarr.save({"w": torch.arange(5)}, place)
    with dcp_zarr.open_checkpoint(place) as opened:
        copied = pickle.loads(pickle.dumps(opened["w"]))
    assert np.asarray(copied).tolist() == [0, 1, 2, 3, 4]


def test_every_flipped_byte_gives_an_error_or_the_right_values(path):
    whole, states = mixed_state()
    for state in states:
        state.pop("big", None)
    whole.pop("big")
    save(path, states, compression=None, read_chunk_bytes=20_000)
    files = [p for p in [Path(path), *Path(path).rglob("*")] if p.is_file()]
    for file in files:
        original = file.read_bytes()
        for position in range(0, len(original), max(len(original) // 40, 1)):
            if not any(original[max(position - 8, 0) : position + 8]):
                continue  # a hole, which nobody reads
            damaged = bytearray(original)
            damaged[position] ^= 4
            file.write_bytes(damaged)
            try:
                found = dcp_zarr.load(path, flat=True, weights_only=False)
            except dcp_zarr.DcpZarrError:
                continue
            assert_equal(found, whole)
        file.write_bytes(original)


def test_a_checkpoint_cut_short_is_refused(path):
    _, states = mixed_state()
    save(path, states)
    for file in [p for p in [Path(path), *Path(path).rglob("c.*")] if p.is_file()]:
        original = file.read_bytes()
        file.write_bytes(original[:-1])
        with pytest.raises(dcp_zarr.DcpZarrError):
            dcp_zarr.load(path, weights_only=False)
        file.write_bytes(original)


@pytest.mark.parametrize("how", ["cp", "tar", "holes filled"])
def test_a_copy_is_exact(path, how):
    whole, states = mixed_state()
    save(path, states, read_chunk_bytes=20_000)
    copy = "copy" + path[1:]
    if how == "cp":
        subprocess.run(["cp", "-r", path, copy], check=True)
    elif how == "tar":
        with tarfile.open("x.tar", "w") as file:
            file.add(path, copy)
        with tarfile.open("x.tar") as file:
            file.extractall(filter="data")
    else:
        shutil.copytree(path, copy) if Path(path).is_dir() else shutil.copyfile(path, copy)
    assert_equal(dcp_zarr.load(copy, flat=True, weights_only=False), whole)


def test_two_jobs_on_one_path_never_mix(place):
    dcp_zarr.save({"w": torch.zeros(5)}, place)

    def begin(value):
        states = [{"w": part} for part in parts(torch.full((600, 50), value), (2, 1))]
        writers = [dcp_zarr.storage_writer(place) for _ in states]
        planners, plans, metadata = ranks.plan(writers, states)
        return lambda: writers[0].finish(
            metadata,
            [
                w.write_data(plan, planner).wait()
                for w, plan, planner in zip(writers, plans, planners, strict=True)
            ],
        )

    first, second = begin(1.0), begin(2.0)
    for finish in (first, second):
        try:
            finish()
        except (dcp_zarr.SaveError, FileNotFoundError):
            continue
    if dcp_zarr.is_complete(place):
        assert len(dcp_zarr.load(place)["w"].unique()) == 1
    else:  # a store has nothing to fall back on
        assert not isinstance(place, str) or "://" in place


def planned(path, value, count):
    """Plan a save; return its writers, planners, plans and Metadata."""
    states = [{"w": part} for part in parts(torch.full((600, 50), value), (count, 1))]
    writers = [dcp_zarr.storage_writer(path, compression=None) for _ in states]
    return writers, *ranks.plan(writers, states)


@pytest.mark.parametrize("late", [2, 4])
def test_a_late_rank_of_a_dead_job_changes_no_byte_of_the_next(place, late):
    writers, planners, plans, _ = planned(place, 1.0, late)
    others, their_planners, their_plans, metadata = planned(place, 2.0, 2)
    results = [
        w.write_data(plan, planner).wait()
        for w, plan, planner in zip(others, their_plans, their_planners, strict=True)
    ]
    with pytest.raises(dcp_zarr.SaveError, match="one path from one job at a time|two jobs are"):
        writers[-1].write_data(plans[-1], planners[-1])
    others[0].finish(metadata, results)
    assert (dcp_zarr.load(place)["w"] == 2).all()
    assert dcp_zarr.open_checkpoint(place).verify() == []


def test_an_early_rank_of_a_dead_job_makes_the_next_fail(place):
    writers, planners, plans, _ = planned(place, 1.0, 2)
    others, their_planners, their_plans, _ = planned(place, 2.0, 2)
    writers[1].write_data(plans[1], planners[1])
    with pytest.raises(dcp_zarr.SaveError, match="two jobs are saving to one path"):
        others[1].write_data(their_plans[1], their_planners[1])


def read_all_in_a_child(opened):
    pid = os.fork()
    if pid == 0:
        ok = all((np.asarray(opened[fqn]) == int(fqn[1:])).all() for fqn in opened)
        os._exit(0 if ok else 1)
    return pid


def test_children_of_a_fork_read_an_open_checkpoint_at_once(path):
    state = {f"w{n}": np.full(50, n) for n in range(100)}
    dcp_zarr.save({fqn: torch.from_numpy(value) for fqn, value in state.items()}, path)
    with dcp_zarr.open_checkpoint(path) as opened:
        children = [read_all_in_a_child(opened) for _ in range(4)]
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def test_a_commit_whose_last_sync_fails_gives_the_old_checkpoint_back(path, monkeypatch):
    def fail(_):
        raise OSError(5, "Input/output error")

    here = Path.cwd()
    for exists in (False, True):
        if exists:
            dcp_zarr.save({"w": torch.zeros(3)}, path)
        with monkeypatch.context() as patched:
            patched.setattr(commit, "exchange", lambda *_: False)
            real = commit.sync_directory
            patched.setattr(
                commit, "sync_directory", lambda p, real=real: real(p) if p != here else fail(p)
            )
            with pytest.raises(dcp_zarr.SaveError, match="Input/output error"):
                dcp_zarr.save({"w": torch.ones(3)}, path)
        assert [name for name in os.listdir() if name[0] != "."] == [path] * exists
    assert dcp_zarr.load(path)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("link", ["latest", "latest.zip"])
def test_a_link_is_followed_whatever_its_name(path, link):
    dcp_zarr.save({"w": torch.zeros(3)}, path)
    Path(link).symlink_to(path)
    dcp_zarr.save({"w": torch.ones(3)}, link)
    assert Path(link).is_symlink()
    assert dcp_zarr.load(path)["w"].tolist() == dcp_zarr.load(link)["w"].tolist() == [1, 1, 1]


def test_a_pipe_is_no_checkpoint_and_is_left_alone(path):
    os.mkfifo(path)
    with pytest.raises(dcp_zarr.FormatError):
        dcp_zarr.open_checkpoint(path)
    with pytest.raises(dcp_zarr.CheckpointExistsError):
        dcp_zarr.save({"w": torch.ones(3)}, path)


def test_a_tensor_may_have_as_many_axes_as_the_container_knows(place):
    most = 32 if place == "x.h5" else 64
    whole = torch.arange(70_000).reshape((1,) * (most - 1) + (-1,))
    dcp_zarr.save({"w": whole}, place, compression=None)
    assert torch.equal(dcp_zarr.load(place)["w"], whole)


def test_few_open_files_are_enough(path):
    program = (
        "import resource, torch, dcp_zarr; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
        "dcp_zarr.save({f'w{n}': torch.ones(3) for n in range(2000)}, 'PATH')".replace("PATH", path)
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert len(dcp_zarr.open_checkpoint(path)) == 2000


class Cached(DefaultSavePlanner):
    def __init__(self):
        super().__init__(enable_plan_caching=True)


def test_plans_that_torch_caches_give_the_right_bytes(path):
    for name in vars(DefaultSavePlanner):
        if name.startswith("_cached"):
            getattr(DefaultSavePlanner, name).clear()
    for step in range(3):
        state = {"w": torch.full((70, 50), float(step)), "step": step}
        if step == 2:
            state["new"] = torch.ones(3)
        where = f"{step}{path}"
        dcp.save(
            state,
            storage_writer=dcp_zarr.storage_writer(where),
            planner=Cached(),
            no_dist=True,
        )
        assert_equal(dcp_zarr.load(where), state)


def test_a_store_in_one_container_is_moved_into_another():
    _, states = mixed_state()
    save("x.zarr", states)
    with zipfile.ZipFile("packed.zip", "w") as file:  # as zip -0 does
        for part in sorted(p for p in Path("x.zarr").rglob("*") if p.is_file()):
            file.write(part, part.relative_to("x.zarr"))
    assert_equal(dcp_zarr.load("packed.zip"), dcp_zarr.load("x.zarr"))
    assert dcp_zarr.open_checkpoint("packed.zip").verify() == []
    save("y.zarr.zip", states)
    with zipfile.ZipFile("y.zarr.zip") as file:
        file.extractall("y.zarr")
    assert_equal(dcp_zarr.load("y.zarr"), dcp_zarr.load("x.zarr"))
