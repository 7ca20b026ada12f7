"""A store may come from anybody: each of these is an error of ours, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr.canonical_json import digest

ARRAY = ("entries", 0)
MUTATIONS = {
    "path outside": ((*ARRAY, "path"), "../secret.zarr/w"),
    "absolute path": ((*ARRAY, "path"), "/etc"),
    "path of a number": ((*ARRAY, "path"), 7),
    "negative read chunk": ((*ARRAY, "read_chunk_shape"), [-1, 64]),
    "zero read chunk": ((*ARRAY, "read_chunk_shape"), [0, 64]),
    "huge read chunk": ((*ARRAY, "read_chunk_shape"), [10**12, 64]),
    "write chunk no multiple": ((*ARRAY, "write_chunk_shape"), [7, 7]),
    "other rank": ((*ARRAY, "shape"), [64]),
    "boolean shape": ((*ARRAY, "shape"), [True, 64]),
    "huge shape": ((*ARRAY, "shape"), [2**70, 64]),
    "unknown dtype": ((*ARRAY, "torch_dtype"), "float7"),
    "unknown codec": (("codecs", 0), [{"name": "rot13", "configuration": {}}, {"name": "crc32c"}]),
    "codec without options": (("codecs", 0), [{"name": "blosc"}, {"name": "crc32c"}]),
    "codec far away": ((*ARRAY, "codec"), 99),
    "negative codec": ((*ARRAY, "codec"), -1),
    "countless regions": ((*ARRAY, "tiling"), {"step": [1, 1], "count": [10**6, 10**6]}),
    "region outside": ((*ARRAY, "tiling"), {"offsets": [[0, 0]], "sizes": [[65, 64]]}),
    "huge list": (("planner_data", 0), ["w", 10**8]),
    "list key below zero": (("planner_data", 0), ["w", -1]),
    "object outside": (("entries", 1), {"fqn": "o", "offset": 0, "nbytes": 10**9}),
    "object before": (("entries", 1), {"fqn": "o", "offset": -5, "nbytes": 5}),
    "entry twice": (("entries", 1), {"fqn": "w", "json": 1}),
    "entry of text": (("entries", 1), "o"),
    "version true": (("format_version",), True),
    "version below one": (("format_version",), -1),
    "no entries": (("entries",), None),
}


@pytest.fixture
def checkpoint(_in_temporary_directory):
    state = {"w": torch.ones(64, 64), "o": (1, 2)}
    dcp_zarr.save(state, "x.zarr", read_chunk_bytes=4096)
    return Path("x.zarr/zarr.json")


def touch_everything():
    with dcp_zarr.open_checkpoint("x.zarr") as opened:
        opened.verify()
        repr(opened)
    dcp_zarr.load("x.zarr")
    dcp_zarr.ZarrStorageReader("x.zarr").read_metadata()


@pytest.mark.parametrize(("where", "value"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_schema_that_lies_is_refused(checkpoint, where, value):
    document = json.loads(checkpoint.read_bytes())
    schema = document["attributes"]["dcp_zarr"]
    node = schema
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    del schema["digest"]
    schema["digest"] = digest(schema)
    checkpoint.write_text(json.dumps(document))
    with pytest.raises(dcp_zarr.DcpZarrError):
        touch_everything()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"attributes": {"dcp_zarr": {"format_version": 1, "x": NaN}}}',
        "null",
        "[]",
    ],
    ids=["empty", "deep", "nan", "null", "list"],
)
def test_a_root_that_is_no_document_is_refused(checkpoint, text):
    checkpoint.write_text(text)
    with pytest.raises(dcp_zarr.DcpZarrError):
        touch_everything()


def test_directories_in_the_place_of_files_are_damage(checkpoint):
    for name in ("x.zarr/w/c.0.0", "x.zarr/w/zarr.json"):
        path = Path(name)
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        with dcp_zarr.open_checkpoint("x.zarr") as opened:
            assert opened.verify()
        with pytest.raises(dcp_zarr.CorruptionError, match="Tensor 'w' .* cannot be read"):
            dcp_zarr.load("x.zarr")
        path.rmdir()
        path.write_bytes(content)


def test_a_damaged_object_is_named(checkpoint):
    path = next(Path("x.zarr/~_objects").glob("c.*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(dcp_zarr.CorruptionError, match="Object 'o' in '.*' cannot be read"):
        dcp_zarr.load("x.zarr")
