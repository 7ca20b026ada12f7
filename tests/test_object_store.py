"""Checkpoints in object stores: S3's API over loopback, HTTP, and stores as objects."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import obstore
import pytest
import torch
import torch.distributed as dist
from obstore.store import LocalStore, MemoryStore, S3Store
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from dcp_zarr.containers.by_path import new_target
from dcp_zarr.containers.object_store import ranges_of
from tests import processes, ranks
from tests.ranks import parts
from tests.test_cli import run

URL = "s3://bucket/runs/step-1.zarr"
MB = 1 << 20


@pytest.fixture(autouse=True)
def _empty(request):
    if "s3" in request.fixturenames:
        request.getfixturevalue("s3")
        store = S3Store.from_url("s3://bucket")
        obstore.delete(store, [meta["path"] for some in obstore.list(store) for meta in some])


def keys():
    store = S3Store.from_url("s3://bucket")
    return sorted(meta["path"] for some in obstore.list(store) for meta in some)


def two_halves(whole):
    return [{"w": part} for part in parts(whole, (2, 1))]


def save(states, place=URL, **options):
    return ranks.save(lambda: dcp_zarr.storage_writer(place, **options), states)


def test_a_store_holds_an_object_for_each_part_and_nothing_else(s3):
    save(two_halves(torch.ones(1001, 500)), compression=None)
    found = [key.removeprefix("runs/step-1.zarr/") for key in keys()]
    objects = [key for key in found if key.startswith("w/c")]
    assert found == [*objects, "w/zarr.json", "zarr.json"]
    assert len(objects) > 1


def test_zarr_alone_reads_a_store(s3):
    import zarr

    dcp_zarr.save({"m": {"w": torch.arange(12.0).reshape(3, 4)}}, URL)
    group = zarr.open_group(zarr.storage.ObjectStore(S3Store.from_url(URL)), mode="r")
    assert group["m/w"][:].tolist() == torch.arange(12.0).reshape(3, 4).tolist()


@pytest.mark.parametrize(
    ("index", "data_requests"),
    [
        (..., ["w/c.0.0", "w/c.1.0", "w/c.2.0"]),
        (7, ["w/c.0.0 bytes=-116", "w/c.0.0 bytes=0-1048579"]),
        (slice(250, 260), ["w/c.0.0 bytes=-116", "w/c.0.0 bytes=0-2097159"]),
        ((slice(None), slice(0, 0)), []),
    ],
)
def test_one_tensor_takes_a_request_for_the_root_before_and_after_and_one_for_each_part(
    s3, index, data_requests
):
    saved = torch.arange(5120 * 1024.0).reshape(5120, 1024)
    dcp_zarr.save({"w": saved, "other": torch.ones(3)}, URL, compression=None)
    s3.requests()
    values = dcp_zarr.open_checkpoint(URL)["w"].numpy(index)
    requests = [line.removesuffix("?").strip() for line in s3.requests()]
    assert np.array_equal(values, saved.numpy()[index])
    root = "GET /bucket/runs/step-1.zarr/zarr.json"
    expected = [f"GET /bucket/runs/step-1.zarr/{part}" for part in data_requests]
    assert (requests[0], requests[-1]) == (root, root)
    assert sorted(requests[1:-1]) == sorted(expected)


def test_an_index_is_read_once(s3):
    saved = torch.arange(2048 * 1024.0).reshape(2048, 1024)
    dcp_zarr.save({"w": saved}, URL, compression=None)
    with dcp_zarr.open_checkpoint(URL) as checkpoint:
        s3.requests()
        for row in (0, 300, 600):
            assert np.array_equal(checkpoint["w"].numpy(row), saved[row].numpy())
        assert sum("bytes=-" in line for line in s3.requests()) == 1


def test_ranges_that_lie_near_are_joined():
    assert ranges_of([(50, 10), (0, 10), (15, 5), (61, 0)], 5) == [(0, 20), (50, 61)]


@pytest.mark.parametrize("kind", ["500", "503", "cut", "lost"])
@pytest.mark.parametrize("match", ["PUT", "GET", "POST", "zarr.json", "w/c", ".partial"])
def test_a_server_that_fails_for_a_while_is_asked_again(s3, kind, match):
    whole = torch.randn(401, 70)
    save(two_halves(torch.zeros(401, 70)))
    s3.fail(kind, match, times=3)
    save(two_halves(whole))
    assert torch.equal(dcp_zarr.load(URL)["w"], whole)


def test_slow_answers_are_waited_for(s3):
    s3.fail("slow", "zarr.json", seconds=0.3, times=2)
    dcp_zarr.save({"w": torch.ones(3)}, URL)
    assert dcp_zarr.load(URL)["w"].tolist() == [1, 1, 1]


def test_an_endpoint_without_tls_has_to_be_allowed(monkeypatch):
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(dcp_zarr.StoreError, match="Set AWS_ALLOW_HTTP=true"):
        dcp_zarr.open_checkpoint(URL)


def test_expired_credentials_are_told_with_the_address(s3):
    dcp_zarr.save({"w": torch.ones(3)}, URL)
    s3.fail("403", "/runs/", times=99, code="ExpiredToken")
    told = (
        "'s3://bucket/runs/step-1.zarr' failed. Access is refused: check the credentials, .*Expired"
    )
    with pytest.raises(dcp_zarr.StoreError, match=f"(?s)Reading 'zarr.json' in {told}") as caught:
        dcp_zarr.open_checkpoint(URL)
    assert caught.value.path == URL
    with pytest.raises(dcp_zarr.StoreError, match="Access is refused"):
        dcp_zarr.save({"w": torch.zeros(3)}, URL)
    s3.requests()
    assert dcp_zarr.load(URL)["w"].tolist() == [1, 1, 1]


def test_a_failure_names_tensor_region_rank_and_address(s3):
    s3.fail("403", "/w/c", times=99, code="AccessDenied")
    writers = [dcp_zarr.storage_writer(URL) for _ in range(2)]
    planners, plans, _ = ranks.plan(writers, two_halves(torch.ones(401, 70)))
    with pytest.raises(
        dcp_zarr.StoreError,
        match=r"Rank 1 could not save tensor 'w' \[201:401, 0:70\]: Writing 'w/c.1.0' in 's3://",
    ) as caught:
        writers[1].write_data(plans[1], planners[1])
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.fqn, error.region, error.rank, error.path) == ("w", "[201:401, 0:70]", 1, URL)
    s3.requests()
    assert not dcp_zarr.is_complete(URL)
    dcp_zarr.save({"w": torch.ones(401, 70)}, URL)
    s3.fail("403", "/w/c", times=99, code="AccessDenied")
    with pytest.raises(dcp_zarr.StoreError, match=r"Tensor 'w' \[0:401, 0:70\] in 's3://.*refused"):
        np.asarray(dcp_zarr.open_checkpoint(URL)["w"])
    with pytest.raises(dcp_zarr.StoreError, match="refused"):
        dcp_zarr.open_checkpoint(URL).verify()


def test_a_save_that_never_finished_is_told_from_none(s3):
    with pytest.raises(dcp_zarr.CheckpointNotFoundError, match="it has no zarr.json"):
        dcp_zarr.open_checkpoint(URL)
    writers = [dcp_zarr.storage_writer(URL) for _ in range(2)]
    ranks.plan(writers, two_halves(torch.ones(401, 70)))
    with pytest.raises(dcp_zarr.IncompleteCheckpointError, match="under way, or never finished"):
        dcp_zarr.open_checkpoint(URL)
    assert not dcp_zarr.is_complete(URL)
    writers[0].prepare_global_plan([])  # gives the other up
    save(two_halves(torch.ones(401, 70)))
    assert dcp_zarr.is_complete(URL)


def test_what_is_not_ours_is_never_replaced(s3):
    store = S3Store.from_url(URL)
    for key, content in (("precious", b"1"), ("zarr.json", b'{"attributes": {}}')):
        obstore.put(store, key, content)
        with pytest.raises(dcp_zarr.CheckpointExistsError, match="is not a dcp_zarr checkpoint"):
            dcp_zarr.save({"w": torch.ones(3)}, URL)
        assert keys() == [f"runs/step-1.zarr/{key}"]
        obstore.delete(store, key)


def test_a_reader_never_mixes_two_saves(s3):
    dcp_zarr.save({"a": torch.ones(9, 9), "b": torch.ones(9, 9)}, URL)
    reader = dcp_zarr.storage_reader(URL)
    state = {"a": torch.zeros(9, 9), "b": torch.zeros(9, 9)}
    reader.read_metadata()
    dcp_zarr.save({"a": torch.full((9, 9), 2.0), "b": torch.full((9, 9), 2.0)}, URL)
    reader.read_metadata = lambda: dcp_zarr.open_checkpoint(URL).metadata()
    with pytest.raises(dcp.CheckpointException, match="was replaced while it was read"):
        dcp.load(state, storage_reader=reader, no_dist=True)


def test_a_save_whose_place_is_taken_never_commits(s3):
    states = two_halves(torch.ones(401, 70))
    writers = [dcp_zarr.storage_writer(URL) for _ in states]
    planners, plans, metadata = ranks.plan(writers, states)
    results = [
        writer.write_data(plan, planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    others = [dcp_zarr.storage_writer(URL) for _ in states]
    ranks.plan(others, states)
    with pytest.raises(dcp_zarr.SaveError, match="began while this one was writing"):
        writers[0].finish(metadata, results)
    assert not dcp_zarr.is_complete(URL)


def test_a_straggler_that_had_begun_replaces_no_piece_of_the_next_save(s3):
    states = two_halves(torch.ones(401, 7))
    dead = [dcp_zarr.storage_writer(URL) for _ in states]
    ranks.plan(dead, states)
    straggler = new_target(URL, hdf5=False, overwrite=True, sync=True).open_sink(1, None)
    straggler.stage("pieces", 0, [b"of another save"])
    writers = [dcp_zarr.storage_writer(URL) for _ in states]
    planners, plans, metadata = ranks.plan(writers, states)
    results = [
        writer.write_data(plan, planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    assert any(".partial/1.pieces.0" in key for key in keys())
    with pytest.raises(dcp_zarr.SaveError, match="'.partial/1.pieces.0' exists already.*two jobs"):
        straggler.close()
    writers[0].finish(metadata, results)
    assert (dcp_zarr.load(URL)["w"] == 1).all()


def test_a_rank_that_sees_another_store_is_named(s3, monkeypatch):
    states = two_halves(torch.ones(401, 70))
    writers = [dcp_zarr.storage_writer(URL), dcp_zarr.storage_writer("s3://bucket/other.zarr")]
    planners, plans, _ = ranks.plan(writers, states)
    with pytest.raises(dcp_zarr.SaveError, match="Rank 1 does not see .*is it the same store"):
        writers[1].write_data(plans[1], planners[1])


def test_a_lost_claim_is_told(s3):
    states = two_halves(torch.ones(401, 70))
    writers = [dcp_zarr.storage_writer(URL) for _ in states]
    planners, plans, metadata = ranks.plan(writers, states)
    results = [
        writer.write_data(plan, planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    obstore.delete(S3Store.from_url(URL), ".partial/1.claim")
    with pytest.raises(dcp_zarr.SaveError, match="What rank 1 wrote is not visible from the coord"):
        writers[0].finish(metadata, results)


def test_everything_staged_comes_back_however_large(s3):
    whole = torch.arange(3 * 1_000_003.0).reshape(-1, 3).contiguous()  # cut everywhere
    states = [{"w": part} for part in parts(whole, (1, 3))]
    save(states, compression=None, statistics=True)
    assert torch.equal(dcp_zarr.load(URL)["w"], whole)
    assert dcp_zarr.open_checkpoint(URL).stats()[0].max == whole.max()


def test_https_reads_and_does_not_write(s3):
    dcp_zarr.save({"w": torch.arange(600_000.0).reshape(600, 1000)}, URL, compression=None)
    address = f"{s3.url}/bucket/runs/step-1.zarr"
    with dcp_zarr.open_checkpoint(address) as checkpoint:
        assert checkpoint["w"].numpy(slice(3, 4)).ravel()[:2].tolist() == [3000, 3001]
        assert checkpoint.verify() == []
    with pytest.raises(dcp_zarr.OptionError, match="can be read, but not written"):
        dcp_zarr.save({"w": torch.ones(3)}, address)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_a_web_server_that_knows_no_ranges_serves_a_directory(tmp_path):
    saved = torch.arange(600_000.0).reshape(600, 1000)
    dcp_zarr.save({"w": saved}, "x.zarr", compression=None)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with dcp_zarr.open_checkpoint(f"http://127.0.0.1:{server.server_port}/x.zarr/") as opened:
            assert np.array_equal(opened["w"].numpy(slice(3, 5)), saved[3:5].numpy())
            assert np.array_equal(np.asarray(opened["w"]), saved.numpy())
        server.shutdown()


def test_the_command_line_reads_a_store(s3):
    dcp_zarr.save({"model": {"w": torch.ones(3)}}, URL)
    assert "w  float32 [3]" in run("ls", URL)
    assert "no damage in 1 tensors" in run("verify", URL)


@pytest.mark.parametrize("place", ["s3://bucket/x.h5", "s3://bucket/x.zarr.zip"])
def test_files_of_one_piece_are_refused_in_a_store(place):
    for act in (lambda: dcp_zarr.save({"w": torch.ones(1)}, place), dcp_zarr.open_checkpoint):
        with pytest.raises(dcp_zarr.OptionError, match="in an object store a checkpoint is a Zarr"):
            act(place) if act is dcp_zarr.open_checkpoint else act()


def test_an_hdf5_writer_takes_no_store():
    writer = dcp_zarr.HDF5StorageWriter(MemoryStore())
    with pytest.raises(dcp.CheckpointException, match="in an object store a checkpoint is a Zarr"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)


def test_a_file_url_is_a_path(tmp_path):
    dcp_zarr.save({"w": torch.ones(3)}, f"file://{tmp_path}/a%20b.zarr")
    assert dcp_zarr.load(tmp_path / "a b.zarr")["w"].tolist() == [1, 1, 1]
    assert dcp_zarr.storage_reader(f"file://{tmp_path}/x").checkpoint_id == f"{tmp_path}/x"


def memory_stores():
    import zarr

    return {
        "obstore": MemoryStore(),
        "zarr": zarr.storage.MemoryStore(),
        "zarr of obstore": zarr.storage.ObjectStore(MemoryStore()),
        "wrapped": zarr.storage.LoggingStore(zarr.storage.MemoryStore(), log_level="ERROR"),
    }


@pytest.mark.parametrize("kind", memory_stores())
def test_a_store_in_memory_is_for_one_process(kind):
    store = memory_stores()[kind]
    dcp_zarr.save({"w": torch.ones(5), "o": (1, 2)}, store)
    assert dcp_zarr.load(store)["w"].tolist() == [1] * 5
    assert dcp_zarr.open_checkpoint(store).verify() == []
    refused = "lives in the memory of one process"
    with pytest.raises(dcp_zarr.OptionError, match=refused):
        pickle.dumps(dcp_zarr.storage_writer(store))
    with pytest.raises(dcp_zarr.OptionError, match=refused):
        save(two_halves(torch.ones(401, 70)), store)


def test_a_store_that_cannot_be_written_is_refused(tmp_path):
    import zarr

    LocalStore(tmp_path / "s", mkdir=True)
    for store in (
        zarr.storage.LocalStore(tmp_path / "s", read_only=True),
        zarr.storage.ObjectStore(LocalStore(tmp_path / "s"), read_only=True),
    ):
        with pytest.raises(dcp_zarr.OptionError, match="read-only|can be read, but not written"):
            dcp_zarr.save({"w": torch.ones(5)}, store)


def test_writers_and_checkpoints_pickle_with_their_store(s3, tmp_path):
    places = [URL, S3Store.from_url(URL + "2"), LocalStore(tmp_path / "s", mkdir=True)]
    for place in places:
        dcp_zarr.save({"w": torch.ones(5)}, place)
        writer = pickle.loads(pickle.dumps(dcp_zarr.storage_writer(place)))
        dcp.save({"w": torch.zeros(5)}, storage_writer=writer, no_dist=True)
        with dcp_zarr.open_checkpoint(place) as opened:
            copied = pickle.loads(pickle.dumps(opened["w"]))
            assert np.asarray(copied).tolist() == [0] * 5
        reader = pickle.loads(pickle.dumps(dcp_zarr.storage_reader(place)))
        assert reader.read_metadata() == dcp_zarr.open_checkpoint(place).metadata()


def test_a_fork_is_told_to_open_the_store_itself(s3):
    dcp_zarr.save({"w": torch.ones(5)}, URL)
    opened = dcp_zarr.open_checkpoint(URL)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                np.asarray(opened["w"])
            except dcp_zarr.StoreError as error:
                code = 0 if "was opened before this process was forked" in str(error) else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def save_distributed(rank, count, url, server):
    os.environ |= server
    mesh = init_device_mesh("cpu", (count,))
    for step in (1.0, 2.0):
        state = {
            "cut": distribute_tensor(torch.full((4001, 64), step), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.full((7, 5), step), mesh, [Shard(1)]),
            "step": step,
        }
        metadata = dcp.save(state, storage_writer=dcp_zarr.storage_writer(url))
    assert metadata == dcp_zarr.storage_reader(url).read_metadata()
    zeros = {"cut": distribute_tensor(torch.zeros(4001, 64), mesh, [Shard(1)]), "step": 0}
    dcp.load(zeros, storage_reader=dcp_zarr.storage_reader(url))
    assert (zeros["cut"].to_local() == 2).all()
    assert zeros["step"] == 2
    dist.barrier()


def refuse_on_one_rank(rank, count, url, server):
    os.environ |= server
    mesh = init_device_mesh("cpu", (count,))
    state = {"w": distribute_tensor(torch.randn(640, 80), mesh, [Shard(0)])}
    if rank == 1:
        os.environ["AWS_ENDPOINT_URL"] += "/nowhere"  # a path below it: another server's
    with pytest.raises(dcp.CheckpointException, match="Rank 1 does not see|failed. "):
        dcp.save(state, storage_writer=dcp_zarr.storage_writer(url))


@pytest.mark.dist
def test_two_processes_save_overwrite_and_load(s3, tmp_path):
    # The server that ranks are forked from may be older than the variables that tell of S3.
    server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    processes.run(2, tmp_path, save_distributed, URL, server)
    assert (dcp_zarr.load(URL)["cut"] == 2).all()
    processes.run(2, tmp_path, refuse_on_one_rank, URL, server)
    assert not dcp_zarr.is_complete(URL)


@pytest.mark.dist
def test_an_asynchronous_save_in_another_process_takes_the_url_along(s3, tmp_path):
    program = Path(tmp_path, "run.py")
    program.write_text(ASYNCHRONOUS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, program, URL], check=True, env=environment, timeout=120)
    assert dcp_zarr.load(URL)["w"].tolist() == [1] * 5


ASYNCHRONOUS = """
import os, sys
import torch.distributed as dist, torch
from torch.distributed.checkpoint import state_dict_saver as saver
import dcp_zarr

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(".meet", 1), rank=0, world_size=1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    saver.async_save(
        {"w": torch.ones(5)},
        storage_writer=dcp_zarr.ZarrStorageWriter(sys.argv[1]),
        async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS,
    ).result()
"""


def test_a_save_killed_at_any_request_leaves_no_half_checkpoint(tmp_path):
    program = [sys.executable, "-m", "tests.store_crash", str(tmp_path / "store")]
    root = Path(dcp_zarr.__file__).parent.parent
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    points, old, none, new = map(int, done.stdout.split())
    assert points > 10
    assert min(old, none, new) >= 1
    assert points == old + none + new
