"""Objects that several ranks write at once, each in its slabs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import dcp_zarr
from dcp_zarr import tensors
from dcp_zarr.codecs import checksum
from dcp_zarr.containers import placed
from dcp_zarr.errors import CorruptionError
from tests import ranks
from tests.ranks import parts
from tests.test_dtypes import READERS, read_with

SMALL = {"read_chunk_bytes": 16 << 10}


def save(whole, counts, **options):
    """Save one tensor from a mesh of ranks, check what was saved, and return its one object."""
    states = [{"w": part} for part in parts(whole, counts)]
    ranks.save(lambda: dcp_zarr.ZarrStorageWriter("x.zarr", **options), states)
    loaded = dcp_zarr.load("x.zarr")["w"]
    np.testing.assert_array_equal(tensors.bits(loaded), tensors.bits(whole))
    assert dcp_zarr.open_checkpoint("x.zarr").verify() == []
    found = [path for path in Path("x.zarr/w").iterdir() if path.name != "zarr.json"]
    assert [path.name for path in found] == ["c" + ".0" * whole.ndim]
    return found[0]


def stored_nbytes():
    root = json.loads(Path("x.zarr/zarr.json").read_text())["attributes"]["dcp_zarr"]
    return root["entries"][0]["stored_nbytes"]


@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_files_stay_near_the_number_of_tensors_whatever_the_ranks(count):
    whole = {f"w{n}": torch.randn(1024, 512 + n) for n in range(3)}
    whole |= {"bias": torch.randn(512), "odd": torch.randn(50257, 8)}
    cut = {fqn: parts(w, (count,) + (1,) * (w.ndim - 1)) for fqn, w in whole.items()}
    states = [{fqn: of[rank] for fqn, of in cut.items()} for rank in range(count)]
    ranks.save(lambda: dcp_zarr.ZarrStorageWriter("x.zarr", thread_count=1), states)
    files = [path for path in Path("x.zarr").rglob("*") if path.is_file()]
    documents = [path for path in files if path.name == "zarr.json"]
    assert len(files) - len(documents) <= len(whole)
    for fqn, w in whole.items():
        np.testing.assert_array_equal(zarr.open_array(f"x.zarr/{fqn}")[...], w.numpy())


@pytest.mark.parametrize("compression", [None, "fast", "small"])
@pytest.mark.parametrize(
    "kind",
    ["weights", "zeros", "noise", "half of it zeros", "noise on one rank"],
)
def test_whatever_the_values_take_holes_are_at_most_eight_hundredths(kind, compression):
    torch.manual_seed(0)
    shape = (2048, 256)
    whole = (torch.randn(shape) * 0.02).bfloat16()
    noise = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    if kind == "zeros":
        whole.zero_()
    elif kind == "noise":
        whole = noise
    elif kind == "half of it zeros":
        whole[::2] = 0
    elif kind == "noise on one rank":
        whole[512:1024] = noise[512:1024]
    path = save(whole, (4, 1), compression=compression, **SMALL)
    index = 16 * whole.nbytes // SMALL["read_chunk_bytes"] + 4
    assert path.stat().st_size - index <= 1.08 * stored_nbytes()
    allocated = os.stat(path).st_blocks * 512
    assert allocated <= stored_nbytes() + index + (4 + 2) * 8192


@pytest.mark.parametrize("shape", [(50257, 16), (4099, 300), (129, 1)])
@pytest.mark.parametrize("counts", [(2, 1), (7, 1)])
def test_cut_tensors_are_one_object_too(shape, counts):
    save(torch.randn(shape), counts, **SMALL)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_across_holes(reader):
    whole = torch.randn(4099, 64)  # cut: the coordinator has slabs too
    save(whole, (4, 1), **SMALL)
    np.testing.assert_array_equal(read_with(reader, "x.zarr"), whole.numpy())


def test_regions_of_four_mebibytes_are_objects_of_their_own():
    states = [{"w": part} for part in parts(torch.zeros(2048, 1024), (2, 1))]
    ranks.save(lambda: dcp_zarr.ZarrStorageWriter("x.zarr"), states)
    assert {p.name for p in Path("x.zarr/w").iterdir()} == {"zarr.json", "c.0.0", "c.1.0"}


def written(states, **options):
    """Save up to `finish`; return what that wants."""
    writers = [dcp_zarr.ZarrStorageWriter("x.zarr", **SMALL, **options) for _ in states]
    planners, plans, metadata = ranks.plan(writers, states)
    results = [
        w.write_data(plan, planner).wait()
        for w, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    return writers[0], metadata, results


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"[]")])
def test_a_rank_whose_notes_cannot_be_read_is_named(damage):
    states = [{"w": part} for part in parts(torch.randn(1024, 64), (2, 1))]
    writer, metadata, results = written(states)
    damage(Path(".x.zarr.partial/~_staging/1.placed"))
    with pytest.raises(dcp_zarr.SaveError, match=r"Rank 1's files are not visible"):
        writer.finish(metadata, results)
    assert not Path("x.zarr").exists()


def test_notes_of_another_save_are_not_taken_for_this_one_s():
    states = [{"w": part} for part in parts(torch.randn(1024, 64), (2, 1))]
    writer, metadata, results = written(states)
    staging = Path(".x.zarr.partial/~_staging")
    (staging / "1.placed").write_bytes((staging / "0.placed").read_bytes())
    with pytest.raises(dcp_zarr.SaveError, match=r"'w' is not each read chunk once; the save is"):
        writer.finish(metadata, results)


def test_notes_that_cannot_be_read_are_refused_where_their_checksum_holds():
    notes = b'["w"]\n' + np.arange(4).tobytes()
    assert placed.decode(notes + checksum(notes), 3)[0] == ["w"]
    with pytest.raises(CorruptionError, match="is not what it wrote"):
        placed.decode(b"\xff" * 8, 3)  # four bytes of ones are their own crc32c
