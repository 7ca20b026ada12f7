"""docs/format.md is enough to read a checkpoint."""

from __future__ import annotations

import json
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_zarr import ZarrStorageReader, ZarrStorageWriter
from tests import ranks
from tests.ranks import parts

READER = Path(__file__).parent / "reader_from_format.py"


def states():
    """Two ranks' states: grids, an irregular tiling, an empty region, and objects."""
    torch.manual_seed(0)
    rows, rest = torch.randn(3000, 50), torch.randn(300, 40).bfloat16()
    irregular = [((0, 0), (100, 40)), ((100, 0), (200, 13)), ((100, 13), (200, 27))]
    boxes = [ranks.Part(rest, ranks.Region(*box)) for box in irregular]
    two = parts(torch.randn(2), (4,))
    first, second = parts(rows, (2, 1))
    return [
        {"m.rows": first, "m.rest": boxes[:1], "two": two[:2], "step": 7, "tup": (1, 2)},
        {"m.rows": second, "m.rest": boxes[1:], "two": two[2:3], "big": b"x" * 2_000_000},
    ]


@pytest.mark.parametrize("compression", ["fast", "small", None])
def test_a_reader_written_from_the_document_rebuilds_metadata_and_values(tmp_path, compression):
    saved = states()
    path = tmp_path / "x.zarr"
    metadata = ranks.save(
        lambda: ZarrStorageWriter(path, compression=compression, read_chunk_bytes=20_000), saved
    )
    blocked = "; ".join(f"sys.modules[{n!r}] = None" for n in ("torch", "zarr", "dcp_zarr"))
    program = f"import sys, runpy; {blocked}; sys.argv[1:] = {[str(path), 'm.rows', '<f4']}; "
    program += f"runpy.run_path({str(READER)!r})"
    found = json.loads(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert torch.equal(torch.tensor(found["values"]), saved[0]["m.rows"].whole)
    assert {fqn: tuple(keys) for fqn, *keys in found["planner_data"]} == metadata.planner_data
    assert found["storage_meta"]["save_id"] == metadata.storage_meta.save_id
    assert list(found["entries"]) == list(metadata.state_dict_metadata)
    for fqn, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            assert found["entries"][fqn] == "object"
            continue
        shape, dtype, tiles, properties = found["entries"][fqn]
        assert shape == list(entry.size)
        assert f"torch.{dtype}" == str(entry.properties.dtype)
        assert tiles == [[list(box.offsets), list(box.sizes)] for box in entry.chunks]
        assert properties == {}


def test_the_independent_reader_is_short():
    code = [line for line in READER.read_text().splitlines() if line.strip()]
    assert len(code) <= 60


def test_metadata_read_back_is_what_the_save_returned():
    metadata = ranks.save(lambda: ZarrStorageWriter("x.zarr"), states())
    again = ZarrStorageReader("x.zarr").read_metadata()
    assert again == metadata
    assert again.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    assert list(again.state_dict_metadata) == list(metadata.state_dict_metadata)
    boxes = again.state_dict_metadata["m.rows"].chunks
    assert all(isinstance(box.offsets, torch.Size) for box in boxes)
    keys = again.planner_data["m.rows"]
    assert isinstance(keys, tuple)


def is_pickle(stored: bytes) -> bool:
    """Say whether the bytes from a PROTO opcode on parse as a whole pickle."""
    start = stored.find(b"\x80\x02")
    try:
        list(pickletools.genops(stored[start:]))
    except Exception:  # noqa: BLE001
        return False
    return start >= 0


def test_no_pickle_outside_the_payload_of_objects():
    ranks.save(lambda: ZarrStorageWriter("x.zarr", compression=None), states())
    holders = {
        path
        for path in Path("x.zarr").rglob("*")
        if path.is_file() and b"PK\x03\x04" in path.read_bytes()
    }
    assert {path.parent.name for path in holders} == {"~_objects", "big"}
    for path in Path("x.zarr").rglob("zarr.json"):
        json.loads(path.read_bytes(), parse_constant=pytest.fail)
        assert not is_pickle(path.read_bytes())


def test_documents_hold_exactly_what_the_format_says():
    ranks.save(lambda: ZarrStorageWriter("x.zarr", read_chunk_bytes=20_000), states())
    document = json.loads(Path("x.zarr/m/rows/zarr.json").read_bytes())
    blosc = {"cname": "lz4", "clevel": 1, "shuffle": "bitshuffle", "typesize": 4, "blocksize": 0}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    crc32c = {"name": "crc32c"}
    inner = [little, {"name": "blosc", "configuration": blosc}, crc32c]
    assert document == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3000, 50],
        "data_type": "float32",
        "fill_value": 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3000, 50]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [100, 50],
                    "codecs": inner,
                    "index_codecs": [little, crc32c],
                    "index_location": "end",
                },
            }
        ],
        "dimension_names": ["n3000", "n50"],
        "attributes": {
            "dcp_zarr": {
                "fqn": "m.rows",
                "torch_dtype": "float32",
                "properties": {},
                "tiling": {"step": [1500, 50], "count": [2, 1]},
            }
        },
    }
    assert json.loads(Path("x.zarr/m/zarr.json").read_bytes()) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
    }
    root = json.loads(Path("x.zarr/zarr.json").read_bytes())["attributes"]["dcp_zarr"]
    members = Path(__file__).parents[1].joinpath("docs/format.md").read_text()
    assert all(f"`{member}`" in members for member in root)
    assert all(f"`{member}`" in members for entry in root["entries"] for member in entry)
