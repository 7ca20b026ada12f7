"""Checkpoints of every format version ever released load for ever.

A new version adds samples: ``python -m tests.test_old_samples`` writes those that are missing.
Samples are never written again.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import dcp_zarr
from dcp_zarr import tensors
from dcp_zarr.schema_json import FORMAT_VERSION
from tests import ranks
from tests.ranks import parts
from tests.test_stored_statistics import check_equal

SAMPLES = Path(__file__).parent / "data"
WRITTEN = (1, FORMAT_VERSION)
"""The versions that this release writes: the older one where no statistics are stored."""


def counting(shape, name):
    """Return a tensor of any dtype whose bits count up."""
    itemsize = torch.empty(0, dtype=getattr(torch, name)).element_size()
    raw = np.arange(int(np.prod(shape)) * itemsize, dtype=np.uint64) * 37 % 251
    if name == "bool":
        raw %= 2
    bits = raw.astype(np.uint8).view(f"u{itemsize}" if itemsize <= 8 else "c16")
    return tensors.from_bits(bits.reshape(shape), name)


def state(version):
    """Return what the samples of a version hold: dtypes, names and objects of all kinds.

    Version 2, with statistics, is written beside version 1; its samples have no large tensors.
    """
    large = {
        "model.large": counting((300, 64), "float32"),
        "model.cut": counting((11,), "bfloat16"),
        "model.columns": counting((70, 300), "float32"),
    }
    return {
        **(large if version == 1 else {"model.cut": large["model.cut"]}),
        **{f"dtypes.{name}": counting((3, 2), name) for name in ("bool", "int64", "complex64")},
        "dtypes.float8_e4m3fn": counting((5,), "float8_e4m3fn"),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        "odd/näme": torch.ones(1),
        "scalar.below": torch.ones(2),
        "step": 1000,
        "betas": (0.9, 0.95),
        "names": ["a", None, {"lr": 0.1}],
    }


def write_sample(path, version):
    """Save the state from two ranks."""
    whole = state(version)
    cuts = {"model.large": (2, 1), "model.cut": (2,), "model.columns": (1, 2)}
    cuts = {fqn: counts for fqn, counts in cuts.items() if fqn in whole}
    halves = {fqn: parts(whole[fqn], counts) for fqn, counts in cuts.items()}
    rest = {fqn: value for fqn, value in whole.items() if fqn not in cuts}
    states = [{fqn: half[0] for fqn, half in halves.items()} | rest]
    states.append({fqn: half[1] for fqn, half in halves.items()})
    rules = {"model.large": "fast", "model.columns": None, "": "small"}
    rules = {fqn: codec for fqn, codec in rules.items() if fqn in {"", *whole}}
    options = {"compression": rules, "read_chunk_bytes": 10_000, "overwrite": False}
    options["statistics"] = version == 2
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("v*")), ids=lambda path: path.name)
def test_a_sample_loads_exactly(path):
    expected = state(int(path.stem[1:]))
    loaded = dcp_zarr.load(path, flat=True)
    assert loaded.keys() == expected.keys()
    for fqn, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert loaded[fqn].dtype == value.dtype
            np.testing.assert_array_equal(tensors.bits(loaded[fqn]), tensors.bits(value))
        else:
            assert loaded[fqn] == value
    assert dcp_zarr.open_checkpoint(path).verify() == []


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("v2*")), ids=lambda path: path.name)
def test_a_samples_statistics_are_those_of_its_values(path):
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        assert all(checkpoint[fqn]._entry.sums is not None for fqn in checkpoint)
        check_equal(checkpoint.stats(), checkpoint.stats(stored=False))


@pytest.mark.parametrize("version", WRITTEN)
def test_a_version_has_its_sample_and_still_writes_its_bytes(version, tmp_path):
    """A change of the bytes without a new version fails here."""
    write_sample(tmp_path / "now.zarr", version)
    sample = SAMPLES / f"v{version}.zarr"
    old = {path.relative_to(sample): path for path in sample.rglob("*") if path.is_file()}
    now = tmp_path / "now.zarr"
    assert {p.relative_to(now) for p in now.rglob("*") if p.is_file()} == old.keys()
    for name, path in old.items():
        if name.name == "zarr.json" and name != Path("zarr.json"):
            assert (now / name).read_bytes() == path.read_bytes()
    old_root, root = (
        json.loads((path / "zarr.json").read_text())["attributes"]["dcp_zarr"]
        for path in (sample, now)
    )
    assert comparable(root) == comparable(old_root)


def comparable(schema):
    """Return what of a schema is the same in every save of a state."""
    for entry in schema["entries"]:
        entry.pop("stored_nbytes", None)  # a codec's library may get better
        for name in ("mean", "squares"):  # and other hardware may add in another order
            if number := entry.get("statistics", {}).get(name):
                entry["statistics"][name] = f"{number:.9e}"
    members = ("entries", "codecs", "planner_data", "objects_codec", "metadata_version")
    return {member: schema[member] for member in members}


def described(path):
    """Return what an HDF5 file says of itself: the schema, and how each data set is made."""
    with h5py.File(path) as file:
        data_sets = {}

        def add(name, item):
            if isinstance(item, h5py.Dataset):
                attribute = item.attrs.get("dcp_zarr") if name != "~_read_chunks" else None
                made = item.dtype, item.shape, item.chunks, item._filters
                data_sets[name] = attribute, *made, item.id.get_type().encode()

        file.visititems(add)
        schema = json.loads(file["~_schema"][()])
        del data_sets["~_schema"]  # whose length is not always the same
        root = json.loads(file.attrs["dcp_zarr"])
        assert root.pop("save_id") == schema["save_id"]
        return root, comparable(schema), data_sets


@pytest.mark.parametrize("version", WRITTEN)
def test_a_version_still_writes_the_same_hdf5_file(version, tmp_path):
    write_sample(tmp_path / "now.h5", version)
    assert described(tmp_path / "now.h5") == described(SAMPLES / f"v{version}.h5")


if __name__ == "__main__":
    os.chdir(SAMPLES)
    for version, suffix in product(WRITTEN, ("zarr", "h5")):
        if not Path(f"v{version}.{suffix}").exists():
            write_sample(f"v{version}.{suffix}", version)
