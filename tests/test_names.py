from __future__ import annotations

import json
import re

import h5py
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_zarr
from dcp_zarr import names
from dcp_zarr.errors import OptionError, TensorNotFoundError
from dcp_zarr.pictures.folding import ranges

ODD = [
    "", ".", "..", "a/b", "a.b", "zarr.json", "__x", "c", "new\nline", "\0", "tab\t", "ünïcode",
    "重み", "W", "w", "wW", "Ww", "x" * 300, "y" * 3000, ".".join("d" * 500), "a", "~", "~77",
    "~_value", " lead",
]  # fmt: skip


def unescape(name):
    """Undo the escaping, by what docs/format.md says of it."""
    found = re.sub(
        r"(~[0-9a-f]{2})+",
        lambda match: bytes.fromhex(match[0].replace("~", "")).decode("utf-8", "surrogatepass"),
        name,
    )
    return "" if name == "~" else found


@given(st.text())
def test_escaping_is_reversible_and_legal_everywhere(segment):
    name = names.escape(segment)
    assert unescape(name) == segment
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-~")
    assert name
    assert not name.startswith(("__", "~_"))


@given(st.sets(st.text(alphabet="aA.b/~_", max_size=6)))
def test_paths_differ_in_more_than_case_and_do_not_pass_through_each_other(fqns):
    check_paths(names.assign_paths(fqns))


def test_odd_names_get_good_paths():
    paths = names.assign_paths(ODD)
    check_paths(paths)
    assert max(map(len, paths.values())) <= 1000
    assert max(len(n) for path in paths.values() for n in path.split("/")) <= 200


def check_paths(paths):
    lower = {path.lower() for path in paths.values()}
    assert len(lower) == len(paths)
    assert not lower & {parent.lower() for parent in names.parents(paths.values())}
    assert names.OBJECTS_PATH not in lower


def read_by_others(path):
    """Return all tensors, by name, as zarr-python or h5py reads them."""
    found = {}

    def note(_, node):
        described = json.loads(node.attrs.get("dcp_zarr", "{}"))
        if "fqn" in described:
            found[described["fqn"]] = node[...]

    if path.endswith(".h5"):
        with h5py.File(path) as file:
            file.visititems(note)
        return found
    store = zarr.storage.ZipStore(path, mode="r") if path.endswith(".zip") else path
    arrays = [array for _, array in zarr.open_group(store, mode="r").members(max_depth=None)]
    return {a.attrs["dcp_zarr"]["fqn"]: a[...] for a in arrays if isinstance(a, zarr.Array)}


def test_odd_names_save_and_load_and_are_read_by_others(path):
    source = {fqn: torch.tensor([float(n)]) for n, fqn in enumerate(ODD)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp_zarr.storage_writer(path, sync_files=False)
    dcp.save(source, storage_writer=writer, planner=planner, no_dist=True)
    loaded = dcp_zarr.load(path, flat=True)
    assert loaded == source
    checkpoint = dcp_zarr.open_checkpoint(path)
    assert checkpoint.verify() == []
    assert read_by_others(path) == {fqn: value.numpy() for fqn, value in source.items()}
    str(checkpoint.tree())
    checkpoint._repr_html_()


def test_paths_follow_the_dots_of_names():
    assert names.assign_paths(["model.layers.0.weight"]) == {
        "model.layers.0.weight": "model/layers/0/weight"
    }


FQNS = ["model.0.weight", "model.0.bias", "model.10.weight", "optim.lr", "a*b", "w[0]"]


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("", FQNS),
        ("model", FQNS[:3]),
        ("model.0", FQNS[:2]),
        ("model.1", []),
        ("model.*.weight", ["model.0.weight", "model.10.weight"]),
        ("*.weight", []),
        ("**.weight", ["model.0.weight", "model.10.weight"]),
        ("a*b", ["a*b"]),
        ("mod", []),
        ("model.[0-9]", FQNS[:2]),
        ("model.[0,7-10].weight", ["model.0.weight", "model.10.weight"]),
        ("**.[10]", ["model.10.weight"]),
        ("*.[10]", ["model.10.weight"]),
        ("model.[a-z]", []),
        ("*[0]", ["w[0]"]),
    ],
)
def test_a_pattern_selects_entries_and_all_below(pattern, selected):
    assert list(names.pattern_matches(pattern, FQNS)) == selected


def test_what_a_tree_writes_of_layers_selects_them():
    fqns = [f"h.{layer}.w" for layer in (0, 1, 2, 5, 7, 8)]
    written = f"h.{ranges([0, 1, 2, 5, 7, 8])}"
    assert list(names.pattern_matches(written, [*fqns, "h.3.w"])) == fqns


def test_any_number_of_a_name_may_be_the_one_in_brackets():
    fqns = ["layers.2.experts.5.w", "layers.5.experts.2.w", "layers.5.experts.5.w"]
    assert list(names.pattern_matches("**.[0-3]", fqns)) == fqns[:2]


@pytest.mark.parametrize("pattern", [["model.0", "model.1"], 3, None])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(OptionError, match="is no pattern: give one string"):
        names.select(pattern, FQNS, where="'x'")


def test_a_pattern_without_a_match_names_what_is_near():
    with pytest.raises(
        TensorNotFoundError,
        match=r"Nothing in 'x' is named 'model.0.weigth'. Near it: 'model.0.weight'",
    ):
        names.select("model.0.weigth", FQNS, where="'x'")
