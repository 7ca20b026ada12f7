"""Checkpoints from anybody, changed at random: read exactly, or refused; nothing else happens."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import h5py
import numcodecs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_zarr
from dcp_zarr.codecs import CompressionRules
from dcp_zarr.errors import CorruptionError, SaveError, UnsafeObjectError
from tests import fuzz, ranks

CHANGES = {"directory": 150, "zip": 150, "hdf5": 120, "frames": 500, "staged": 100}


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_what_is_changed_at_random_is_read_exactly_or_refused(kind):
    counts, violations = fuzz.run(kind, 0, CHANGES[kind])
    assert not violations
    assert counts.total() == CHANGES[kind]


CODECS = {
    "fast": "fast",
    "small": "small",
    "zstd": numcodecs.Zstd(1),
    "gzip": numcodecs.GZip(1),
}


@pytest.mark.parametrize("name", CODECS)
@given(frame=st.binary(max_size=300), nbytes=st.integers(0, 2000))
def test_any_bytes_are_a_frame_or_refused(name, frame, nbytes):
    codec = CompressionRules.parse(CODECS[name]).codec("w", 2, 1 << 20)
    try:
        codec.decode(memoryview(frame), memoryview(bytearray(nbytes)))
    except CorruptionError:
        return
    compressor = codec.compressor()
    assert len(compressor.decode(frame)) == nbytes


@pytest.mark.parametrize("name", CODECS)
def test_a_frame_that_holds_more_than_wanted_is_refused_before_it_is_decoded(name, monkeypatch):
    codec = CompressionRules.parse(CODECS[name]).codec("w", 2, 1 << 20)
    frame = bytes(codec.compressor().encode(np.zeros(8 << 20, np.uint16)))
    out = memoryview(bytearray(64))
    with pytest.raises(CorruptionError, match="decodes to .* bytes, expected 64"):
        codec.decode(memoryview(frame), out)


def test_a_frame_of_blosc_that_is_longer_than_what_is_stored_is_refused():
    codec = CompressionRules.parse("fast").codec("w", 2, 1 << 20)
    frame = bytes(codec.compressor().encode(np.arange(999, dtype=np.uint16)))
    with pytest.raises(CorruptionError, match=f"of {len(frame)} bytes is stored in 100"):
        codec.decode(memoryview(frame[:100]), memoryview(bytearray(1998)))


def planted_in_objects(path):
    dcp_zarr.save({"w": torch.ones(3), "o": fuzz.Evil()}, path)


def planted_in_files(path):
    """Put a pickle in the place of each file but the first document, or behind one file."""
    dcp_zarr.save({"w": torch.ones(3), "o": {1}}, path)
    if Path(path).is_dir():
        for file in Path(path).glob("*/*"):
            file.write_bytes(pickle.dumps(fuzz.Evil()))
        return
    with open(path, "ab") as file:
        file.write(pickle.dumps(fuzz.Evil()))


def planted_beside(path):
    """Put pickles where a checkpoint has room for more."""
    dcp_zarr.save({"w": torch.ones(3), "o": {1}}, path)
    evil = pickle.dumps(fuzz.Evil())
    if path.endswith(".h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["dcp_zarr_pickle"] = np.void(evil)
            file["w"].attrs["pickle"] = np.void(evil)
            file["data.pkl"] = np.void(evil)
    elif path.endswith(".zip"):
        with zipfile.ZipFile(path, "a") as packed:
            packed.writestr("x/data.pkl", evil)
            packed.writestr(".metadata", evil)
            packed.comment = evil
    else:
        for name in (".metadata", "data.pkl", "w/.metadata", "model.safetensors.index.json"):
            Path(path, name).write_bytes(evil)


def planted_alone(path):
    Path(path).write_bytes(pickle.dumps(fuzz.Evil()))


@pytest.mark.parametrize(
    "plant",
    [planted_in_objects, planted_in_files, planted_beside, planted_alone],
    ids=lambda plant: plant.__name__,
)
def test_a_pickle_runs_nowhere(path, plant):
    plant(path)
    attempts = [
        lambda: repr(dcp_zarr.open_checkpoint(path)),
        lambda: dcp_zarr.open_checkpoint(path).tree(),
        lambda: dcp_zarr.open_checkpoint(path).stats(),
        lambda: dcp_zarr.open_checkpoint(path).verify(),
        lambda: repr(dcp_zarr.open_checkpoint(path).objects),
        lambda: dcp_zarr.open_checkpoint(path)["w"][...],
        lambda: dcp_zarr.load(path, "w"),
        lambda: dcp_zarr.load(path),
        lambda: dcp_zarr.load_into({"w": torch.zeros(3)}, path, strict=False),
        lambda: dcp_zarr.storage_reader(path).read_metadata(),
        lambda: dcp_zarr.is_complete(path),
    ]
    for attempt in attempts:
        try:
            attempt()
        except dcp_zarr.DcpZarrError:
            continue  # but nothing else
    assert not Path("PWNED").exists()


def test_a_pickle_that_would_run_code_is_refused_by_its_name(path):
    planted_in_objects(path)
    with pytest.raises(UnsafeObjectError, match="'o'"):
        dcp_zarr.load(path)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("name", ["zarr.json", "w/zarr.json", "w/c.0"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda p: Path(p).symlink_to("/dev/zero")])
def test_pipes_and_devices_are_not_waited_for(name, make):
    dcp_zarr.save({"w": torch.ones(3)}, "x.zarr")
    Path("x.zarr", name).unlink()
    make(f"x.zarr/{name}")
    with pytest.raises(CorruptionError, match=f"'{name}' in 'x.zarr' is no file"):
        dcp_zarr.load("x.zarr")


def test_an_hdf5_file_that_sends_libhdf5_beyond_all_bytes_is_refused():
    dcp_zarr.save({"w": torch.ones(3)}, "x.h5")
    content = bytearray(Path("x.h5").read_bytes())
    content[20:28] = (1 << 63).to_bytes(8, "little")  # where its superblock goes on
    content[44:48] = fuzz.lookup3(bytes(content[:44])).to_bytes(4, "little")
    Path("x.h5").write_bytes(content)
    with pytest.raises(CorruptionError, match="not a whole HDF5 file"):
        dcp_zarr.open_checkpoint("x.h5")


def test_a_lost_note_of_a_rank_is_not_taken_for_an_object_that_never_was(path):
    writer = dcp_zarr.storage_writer(path)
    planners, plans, metadata = ranks.plan([writer], [{"w": torch.ones(3), "o": ({1},)}])
    results = [writer.write_data(plans[0], planners[0]).wait()]
    Path(f".{path}.partial/~_staging/0.objects").write_bytes(b"")
    with pytest.raises(SaveError, match="Object 'o' is not in what rank 0 staged"):
        writer.finish(metadata, results)


def test_why_a_checkpoint_cannot_be_loaded_is_not_left_to_dcp(path):
    Path(path).write_bytes(b"no checkpoint")
    with pytest.raises(dcp_zarr.DcpZarrError, match=path):
        dcp_zarr.load_into({"w": torch.zeros(3)}, path)
