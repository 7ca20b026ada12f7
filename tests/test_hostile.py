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
    "more bytes than objects": (("objects_array", "shape"), [2**32]),
    "object before": (("entries", 1), {"fqn": "o", "offset": -5, "nbytes": 5}),
    "entry twice": (("entries", 1), {"fqn": "w", "json": 1}),
    "entry of text": (("entries", 1), "o"),
    "version true": (("format_version",), True),
    "version below one": (("format_version",), -1),
    "no entries": (("entries",), None),
}


SUMS = {
    "nans": 0, "infs": 0, "zeros": 0, "min": 1.0, "max": 1.0, "mean": 1.0, "squares": 0.0,
    "abs_max_at": [0, 0],
}  # fmt: skip
"""What the fixture's tensor comes to."""
STATISTICS = {
    "text": "none",
    "list": [SUMS],
    "null": None,
    "a member missing": {key: value for key, value in SUMS.items() if key != "mean"},
    "boolean count": SUMS | {"nans": True},
    "negative count": SUMS | {"infs": -1},
    "fractional count": SUMS | {"zeros": 0.5},
    "more than there are": SUMS | {"nans": 2**70},
    "more zeros than there are": SUMS | {"zeros": 4097},
    "nothing finite with a mean": SUMS | {"nans": 4096},
    "number of text": SUMS | {"min": "1.0"},
    "number beyond float64": SUMS | {"max": 10**400},
    "boolean number": SUMS | {"mean": True},
    "no mean": SUMS | {"mean": None},
    "least above largest": SUMS | {"min": 2.0},
    "negative squares": SUMS | {"squares": -1.0},
    "place of other axes": SUMS | {"abs_max_at": [0]},
    "place outside": SUMS | {"abs_max_at": [0, 64]},
    "place before": SUMS | {"abs_max_at": [-1, 0]},
    "no place": SUMS | {"abs_max_at": None},
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
    change(checkpoint, where, value)
    with pytest.raises(dcp_zarr.DcpZarrError):
        touch_everything()


def test_an_array_of_countless_objects_is_damage_that_takes_no_time(checkpoint):
    claimed = {"shape": [2**40, 64], "read_chunk_shape": [1, 64], "write_chunk_shape": [1, 64]}
    claimed["tiling"] = {"step": [2**40, 64], "count": [1, 1]}
    for key, value in claimed.items():
        change(checkpoint, (*ARRAY, key), value)
    with dcp_zarr.open_checkpoint("x.zarr") as opened:
        assert f"It claims {2**40} objects" in " ".join(map(str, opened.verify()))


def test_statistics_that_are_right_are_taken(checkpoint):
    change(checkpoint, (*ARRAY, "statistics"), SUMS)
    with dcp_zarr.open_checkpoint("x.zarr") as opened:
        assert list(opened.stats()) == list(opened.stats(stored=False))


@pytest.mark.parametrize("value", STATISTICS.values(), ids=STATISTICS)
def test_statistics_that_no_values_have_are_damage(checkpoint, value):
    change(checkpoint, (*ARRAY, "statistics"), value)
    with pytest.raises(dcp_zarr.CorruptionError, match="The schema in 'x.zarr' is not valid"):
        dcp_zarr.open_checkpoint("x.zarr")


def change(root, where, value):
    """Put a value into the schema, with the digest that belongs to it."""
    document = json.loads(root.read_bytes())
    schema = document["attributes"]["dcp_zarr"]
    node = schema
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    del schema["digest"]
    schema["digest"] = digest(schema)
    root.write_text(json.dumps(document))


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
