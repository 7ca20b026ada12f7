"""The public face: names, DCP's contract, and house rules that a machine can keep."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import numcodecs
import obstore.store
import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcp_zarr
from dcp_zarr import errors
from dcp_zarr.errors import OptionError, TensorNotFoundError

PACKAGE = Path(dcp_zarr.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_public_names_are_complete_and_sorted():
    assert dcp_zarr.__all__ == sorted(dcp_zarr.__all__)
    assert set(errors.__all__) <= set(dcp_zarr.__all__)
    for name in dcp_zarr.__all__:
        assert getattr(dcp_zarr, name).__doc__
    assert dir(dcp_zarr) == dcp_zarr.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dcp_zarr.nothing


@pytest.mark.parametrize(
    ("abstract", "ours"),
    [
        (StorageWriter, dcp_zarr.ZarrStorageWriter),
        (StorageWriter, dcp_zarr.HDF5StorageWriter),
        (StorageReader, dcp_zarr.ZarrStorageReader),
        (StorageReader, dcp_zarr.HDF5StorageReader),
    ],
)
def test_every_method_and_parameter_of_dcps_classes_is_there(abstract, ours):
    for name, method in inspect.getmembers(abstract, inspect.isfunction):
        if name.startswith("_"):
            continue
        mine = getattr(ours, name)
        assert name in vars(ours.__mro__[1]) or not getattr(
            method, "__isabstractmethod__", False
        ), name
        expected = [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]
        found = [(p.name, p.kind) for p in inspect.signature(mine).parameters.values()]
        # Older torch asks for fewer; what it asks for is there, in its order.
        assert [parameter for parameter in found if parameter in expected] == expected, name
    assert ours.__mro__[2] is abstract


def test_a_writer_is_true_picklable_and_no_stager():
    import pickle

    makers = [dcp_zarr.storage_writer, dcp_zarr.storage_reader]
    for made in (make(path) for path in ("x.zarr", "x.h5") for make in makers):
        assert made
        assert not isinstance(made, AsyncStager)
        assert pickle.loads(pickle.dumps(made)).checkpoint_id == made.checkpoint_id
        assert type(made).validate_checkpoint_id("x.zarr")
        assert type(made).validate_checkpoint_id("s3://bucket/x.zarr")
        assert not type(made).validate_checkpoint_id("hdfs://host/x.zarr")


def test_a_reader_pickles_after_it_was_used():
    import pickle

    for path in ("x.zarr", "x.h5"):
        dcp_zarr.save({"w": torch.ones(1)}, path)
        reader = dcp_zarr.storage_reader(path)
        metadata = reader.read_metadata()
        assert pickle.loads(pickle.dumps(reader)).read_metadata() == metadata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype_encoding": "hex"}, "dtype_encoding='hex' is neither 'native' nor 'bits'"),
        ({"compression": numcodecs.GZip(10)}, "GZip.level=10.: levels of gzip are 0 to 9"),
        ({"compression": numcodecs.Blosc("snappy")}, "snappy.* cannot be used"),
        ({"thread_count": 0}, "thread_count=0 is not a whole number of at least 1"),
        (
            {"read_chunk_bytes": 1.5},
            "read_chunk_bytes=1.5 is not a whole number of at least 1 and at",
        ),
        ({"path": "hdfs://b/x.zarr"}, "its scheme is s3, gs, az, https or file"),
        ({"path": "s3://"}, "'s3://' is no address of a checkpoint"),
        ({"path": Path("s3://b/x.zarr")}, "not a local path.* Give an address as text"),
        ({"path": ""}, "The path is empty"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(OptionError, match=message):
        dcp_zarr.ZarrStorageWriter(**options)


def test_what_is_of_the_wrong_type_is_told_what_to_give():
    module = torch.nn.Linear(1, 1)
    with pytest.raises(OptionError, match="not a Linear: give a dict, such as .*state_dict"):
        dcp_zarr.save(module, "x.zarr")
    dcp_zarr.save({"model": module.state_dict()}, "x.zarr")
    with pytest.raises(OptionError, match=r"not a str: load_into\(model, path\)"):
        dcp_zarr.load_into("x.zarr", module)
    with pytest.raises(OptionError, match=r"not 'x.zarr': pass open_checkpoint\(path\)"):
        dcp_zarr.open_checkpoint("x.zarr").diff("x.zarr")
    with pytest.raises(OptionError, match="A path is needed here, not None of type NoneType"):
        dcp_zarr.load(None)
    with pytest.raises(OptionError, match="thread_count=-1 is not a whole number"):
        dcp_zarr.load("x.zarr", thread_count=-1)


def test_where_a_path_is_needed_a_store_is_refused():
    store = obstore.store.LocalStore("x.zarr", mkdir=True)
    dcp_zarr.save({"w": torch.ones(1)}, store)
    for call in (dcp_zarr.latest, dcp_zarr.repack, lambda at: dcp_zarr.convert("x.zarr", at)):
        with pytest.raises(OptionError, match="path is needed here, not LocalStore"):
            call(store)
    with pytest.raises(OptionError, match="Addresses are for saving, opening and loading"):
        dcp_zarr.convert("x.zarr", "s3://bucket/x.zarr")


def test_errors_of_others_pass_as_dcp_raises_them(monkeypatch):
    monkeypatch.setattr("os.pwritev", lambda *_: (_ for _ in ()).throw(LookupError("who?")))
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="who"):
        dcp_zarr.save({"w": torch.ones(1)}, "x.zarr")


@pytest.mark.parametrize("path", ["x.pt", "x.safetensors"])
def test_suffixes_of_other_formats_are_refused(path):
    for make in (dcp_zarr.storage_writer, dcp_zarr.storage_reader):
        with pytest.raises(OptionError, match="has the suffix of another format"):
            make(path)


def test_a_compression_pattern_that_matches_nothing_is_refused():
    with pytest.raises(TensorNotFoundError, match="named 'modle'. Near it: 'model'"):
        dcp_zarr.save({"model": torch.ones(1)}, "x.zarr", compression={"modle": None})


def test_load_gives_the_nested_state_dict_or_a_part():
    state = {"m": {"a": torch.ones(1), "b": [torch.zeros(1), {"c": torch.ones(2)}]}, "step": 3}
    dcp_zarr.save(state, "x.zarr")
    assert str(dcp_zarr.load("x.zarr")) == str(state)
    assert str(dcp_zarr.load("x.zarr", "m.a")) == str({"m": {"a": torch.ones(1)}})
    assert list(dcp_zarr.load("x.zarr", "m.b.**", flat=True)) == ["m.b.0", "m.b.1.c"]
    with pytest.raises(TensorNotFoundError, match="named 'm.x'"):
        dcp_zarr.load("x.zarr", "m.x")


def test_load_into_reports_what_it_did():
    model = torch.nn.Linear(2, 2)
    dcp_zarr.save({"m": {"weight": torch.ones(2, 2), "scale": torch.ones(1)}}, "x.zarr")
    differ = "Missing in the checkpoint: 'm.bias'. Not wanted by the state dict: 'm.scale'. Pass"
    with pytest.raises(TensorNotFoundError, match=differ):
        dcp_zarr.load_into(model, "x.zarr", "m")
    assert not (model.weight == 1).all()
    report = dcp_zarr.load_into(model, "x.zarr", "m", strict=False)
    assert report == dcp_zarr.LoadReport(("m.weight",), ("m.bias",), ("m.scale",))
    assert (model.weight == 1).all()


def test_load_into_a_state_dict_replaces_objects_too():
    dcp_zarr.save({"opt": {"lr": 0.1, "m": torch.ones(2)}}, "x.zarr")
    target = {"lr": 0.0, "m": torch.zeros(2)}
    dcp_zarr.load_into(target, "x.zarr", "opt")
    assert target["lr"] == 0.1
    assert target["m"].tolist() == [1, 1]


def test_load_into_restores_the_extra_state_of_modules():
    class Counter(torch.nn.Linear):
        count = 0

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    saved, fresh = Counter(1, 1), Counter(1, 1)
    saved.count = 5
    dcp_zarr.save(saved.state_dict(), "x.zarr")
    dcp_zarr.load_into(fresh, "x.zarr")
    assert fresh.count == 5


def bound_names(tree):
    """Yield every name that a module defines: functions, classes, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


FORBIDDEN = {"utils", "helpers", "common", "manager", "handler", "info", "data", "obj", "process"}


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_names_use_the_words_of_the_project(module):
    for name in {module.stem, *bound_names(ast.parse(module.read_text()))}:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        assert "shard" not in words, name
        assert not re.search(r"(?<!read_)(?<!write_)chunk", words), name
        assert words.strip("_") not in FORBIDDEN, name


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(module):
    source = module.read_text()
    assert len(source.splitlines()) <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            documented = ast.get_docstring(node)
            lines = (
                node.end_lineno - node.body[bool(documented)].lineno + 1
                if len(node.body) > bool(documented)
                else 0
            )
            assert lines <= 50, node.name
