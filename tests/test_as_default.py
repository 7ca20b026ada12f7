"""Saving and loading by ``checkpoint_id`` alone."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    _async_thread_executor,
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from dcp_zarr.errors import CheckpointExistsError, OptionError, TensorMismatchError
from tests import processes

STATE = {"w": torch.arange(6.0), "step": 7}


def save(path, **storage):
    return dcp.save(dict(STATE), checkpoint_id=path, no_dist=True, **storage)


def load(path, state=None, **storage):
    state = state or {"w": torch.zeros(6), "step": 0}
    dcp.load(state, checkpoint_id=path, no_dist=True, **storage)
    assert torch.equal(state["w"].float(), STATE["w"])
    assert state.get("step", 7) == 7


def names_in_torch():
    executor = _async_thread_executor._ThreadBasedAsyncCheckpointExecutor
    return [
        _storage_utils.FileSystemWriter,
        _storage_utils.FileSystemReader,
        executor.execute_save,
    ]


@pytest.fixture(autouse=True)
def _torch_is_as_before():
    before = names_in_torch()
    yield
    assert names_in_torch() == before


def saved_by(path):
    """Say who saves by an id alone, by what it leaves."""
    save(path)
    return "torch" if Path(path, ".metadata").exists() else "dcp_zarr"


def codec(path):
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        return re.search(r"stored with (\w+)", repr(checkpoint["w"]))[1]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("step-100", None), ("step-100.zarr.zip", b"PK"), ("step-100.h5", b"\x89HDF")],
)
def test_an_id_alone_is_a_path_of_ours(name, begins):
    path = Path("run", name)
    with dcp_zarr.as_default():
        save(path)
        load(path)
    assert dcp_zarr.is_complete(path)
    if begins is None:
        assert (path / "zarr.json").is_file()
    else:
        assert path.read_bytes().startswith(begins)


def test_options_are_the_writers_and_the_readers():
    with dcp_zarr.as_default(compression=None, allow_cast=True, thread_count=1):
        save("x")
        load("x", {"w": torch.zeros(6, dtype=torch.bfloat16)})
    assert codec("x") == "none"
    with dcp_zarr.as_default(), pytest.raises(dcp.CheckpointException) as caught:
        load("x", {"w": torch.zeros(6, dtype=torch.bfloat16)})
    assert isinstance(caught.value.failures[0][0], TensorMismatchError)


def test_what_torch_saved_loads_as_before_and_is_not_replaced():
    save("torchs")
    with dcp_zarr.as_default():
        load("torchs")
        load("torchs", {"w": torch.zeros(6, dtype=torch.bfloat16)})  # torch's reader casts
        with pytest.raises(dcp.CheckpointException) as caught:
            save("torchs")
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    load("torchs")


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="torch 2.9 and later"
)
def test_what_torch_saved_for_each_rank_loads_too(tmp_path):
    processes.run(1, tmp_path, save_and_load_without_collectives)


def save_and_load_without_collectives(rank, count):
    dcp.save(dict(STATE), checkpoint_id="x", use_collectives=False)
    assert not Path("x", ".metadata").exists()
    with dcp_zarr.as_default():
        state = {"w": torch.zeros(6), "step": 0}
        dcp.load(state, checkpoint_id="x")
    assert state["step"] == 7


def test_safetensors_load_by_their_path():
    dcp_zarr.save({"w": STATE["w"]}, "x.zarr")
    dcp_zarr.export("x.zarr", "model.safetensors")
    with dcp_zarr.as_default():
        load("model.safetensors", {"w": torch.zeros(6)})


def test_a_storage_that_is_given_is_used():
    with dcp_zarr.as_default():
        save("torchs", storage_writer=dcp.FileSystemWriter("torchs"))
        assert Path("torchs", ".metadata").exists()
        load("torchs", storage_reader=dcp.FileSystemReader("torchs"))


def test_it_ends_with_its_block_also_where_that_raises():
    with contextlib.suppress(ZeroDivisionError), dcp_zarr.as_default():
        assert saved_by("a") == "dcp_zarr"
        raise ZeroDivisionError
    assert saved_by("b") == "torch"


def test_the_innermost_one_is_asked():
    with dcp_zarr.as_default():
        with dcp_zarr.as_default(compression=None):
            save("inner")
        save("outer")
    assert [codec("inner"), codec("outer")] == ["none", "lz4"]


def test_a_plain_call_holds_until_it_is_closed_in_any_order():
    first, second = dcp_zarr.as_default(), dcp_zarr.as_default(compression=None)
    first.close()
    save("x")
    assert codec("x") == "none"
    second.close()
    second.close()
    assert saved_by("y") == "torch"


def test_a_wrong_option_is_told_at_once():
    with pytest.raises(OptionError, match="thread_count"):
        dcp_zarr.as_default(thread_count=0)
    with pytest.raises(TypeError, match="chunks"):
        dcp_zarr.as_default(chunks=3)
    assert saved_by("x") == "torch"


def test_an_id_that_is_no_path_of_ours_is_refused():
    with dcp_zarr.as_default():
        with pytest.raises(OptionError, match="'ftp://bucket/x' is no address"):
            save("ftp://bucket/x")
        with pytest.raises(OptionError, match="'x.pt' has the suffix of another format"):
            save("x.pt")


def has_moved(monkeypatch):
    monkeypatch.delattr(_storage_utils, "FileSystemWriter")


def has_another_list(monkeypatch):
    monkeypatch.setattr(
        state_dict_saver, "_storage_setup", lambda *_, **__: dcp.FileSystemWriter("x")
    )


def loads_otherwise(monkeypatch):
    monkeypatch.delattr(state_dict_loader, "_storage_setup")


def saves_asynchronously_otherwise(monkeypatch):
    executor = _async_thread_executor._ThreadBasedAsyncCheckpointExecutor
    monkeypatch.setattr(executor, "execute_save", lambda self, state_dict: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (has_moved, "no attribute 'FileSystemWriter'"),
        (has_another_list, "state_dict_saver chose FileSystemWriter"),
        (loads_otherwise, "no attribute '_storage_setup'"),
        (saves_asynchronously_otherwise, "takes other arguments"),
    ],
)
def test_a_torch_that_is_not_known_is_refused_and_left_as_it_is(change, said):
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(monkeypatch)
        before = vars(_storage_utils).copy()
        with pytest.raises(OptionError, match=f"how torch 2.* chooses its storage .*{said}"):
            dcp_zarr.as_default()
        assert vars(_storage_utils) == before


class LateStager:
    """Stages only when it is told to."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(self):
        self.may_go_on = threading.Event()

    def stage(self, state_dict):
        staged = Future()
        threading.Thread(
            target=lambda: (self.may_go_on.wait(60), staged.set_result(state_dict))
        ).start()
        return staged

    def synchronize_staging(self):
        pass

    def close(self):
        pass


@pytest.mark.dist
@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters, reason="torch 2.7 has none"
)
def test_an_asynchronous_save_stays_ours_when_its_block_has_ended(tmp_path):
    processes.run(1, tmp_path, save_after_the_block)
    assert dcp_zarr.load(tmp_path / "x")["step"] == 7


def save_after_the_block(rank, count):
    stager = LateStager()
    with dcp_zarr.as_default():
        saved = dcp.async_save(dict(STATE), checkpoint_id="x", async_stager=stager)
    stager.may_go_on.set()
    saved.upload_completion.result(60)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_ranks_save_and_load_by_an_id_alone(tmp_path, kind):
    processes.run(2, tmp_path, save_and_load, kind)
    assert torch.equal(dcp_zarr.load(tmp_path / "step-1")["w"], torch.arange(12.0))
    assert torch.equal(dcp_zarr.load(tmp_path / "step-2")["w"], torch.arange(12.0) + 1)


def save_and_load(rank, count, kind):
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])}
    dcp.save(state, checkpoint_id="torchs")
    kinds = dcp.state_dict_saver.AsyncCheckpointerType
    with dcp_zarr.as_default():
        dcp.save(state, checkpoint_id="step-1")
        state["w"] += 1
        saved = dcp.async_save(state, checkpoint_id="step-2", async_checkpointer_type=kinds[kind])
    saved.result()
    for path, more in (("step-2", 1), ("step-1", 0), ("torchs", 0)):
        state["w"].to_local().zero_()
        with dcp_zarr.as_default():
            dcp.load(state, checkpoint_id=path)
        assert torch.equal(state["w"].full_tensor(), torch.arange(12.0) + more)
    dist.barrier()
