"""`verify` finds damage in every byte that a reader uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_zarr
from tests import ranks
from tests.ranks import parts


@pytest.fixture
def checkpoint(path):
    """Objects with an index and without, a cut tensor, objects, and groups."""
    torch.manual_seed(0)
    state = [
        {"m.rows": part, "m.cut": cut, "step": 1} if n == 0 else {"m.rows": part, "m.cut": cut}
        for n, (part, cut) in enumerate(
            zip(parts(torch.randn(1024, 20), (2, 1)), parts(torch.randn(11), (2,)), strict=True)
        )
    ]
    state[0]["tup"] = (1, 2)
    options = {"compression": None, "read_chunk_bytes": 10_240}
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), state)


def verify(path):
    with dcp_zarr.open_checkpoint(path) as opened:
        return opened.verify()


@pytest.mark.usefixtures("checkpoint")
def test_a_sound_checkpoint_has_no_damage(path):
    assert verify(path) == []


@pytest.mark.parametrize("path", ["x.zarr"])
@pytest.mark.usefixtures("checkpoint")
def test_every_flipped_byte_of_every_file_is_found():
    files = [path for path in Path("x.zarr").rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        original = path.read_bytes()
        for position in range(0, len(original), max(len(original) // 60, 1)):
            if not any(original[max(position - 8, 0) : position + 8]):
                continue  # a hole between the slabs of two ranks, which nobody reads
            damaged = bytearray(original)
            damaged[position] ^= 4
            path.write_bytes(damaged)
            try:
                found = verify("x.zarr")
            except dcp_zarr.DcpZarrError:
                assert path == Path("x.zarr/zarr.json")
            else:
                # White space and member names aside, the root is all digest.
                assert found or path == Path("x.zarr/zarr.json"), (path, position)
        path.write_bytes(original)


@pytest.mark.parametrize("path", ["x.zarr"])
@pytest.mark.usefixtures("checkpoint")
def test_damage_is_named():
    Path("x.zarr/m/zarr.json").write_text("{}")
    Path("x.zarr/m/cut/c.0").unlink()
    path = Path("x.zarr/m/rows/c.0.0")
    original = path.read_bytes()
    path.write_bytes(b"\xff" + original[1:])
    assert sorted(map(str, verify("x.zarr"))) == [
        "'m/zarr.json' was changed after the save.",
        "m.cut [0:11]: 'm/cut/c.0' is missing.",
        "m.rows [0:1024, 0:20]: The checksum of its read chunk [0:128, 0:20] does not hold.",
    ]


def test_is_complete_tells_whole_checkpoints_from_the_rest(path):
    assert not dcp_zarr.is_complete(path)
    Path(path).mkdir()
    assert not dcp_zarr.is_complete(path)
    Path(path).rmdir()
    writer = dcp_zarr.storage_writer(path)
    planners, plans, metadata = ranks.plan([writer], [{"w": torch.ones(1)}])
    results = [writer.write_data(plans[0], planners[0]).wait()]
    assert not dcp_zarr.is_complete(path)
    writer.finish(metadata, results)
    assert dcp_zarr.is_complete(path)
    root = Path(path, "zarr.json") if path == "x.zarr" else Path(path)
    root.write_bytes(root.read_bytes()[:-20])
    with pytest.raises(dcp_zarr.CorruptionError):
        dcp_zarr.is_complete(path)
