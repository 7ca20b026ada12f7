"""What other programs saved is opened like a checkpoint of ours: lazily, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_zarr
from dcp_zarr import cli
from dcp_zarr.containers.by_path import open_source
from dcp_zarr.containers.foreign.safetensors import TORCH_DTYPES
from dcp_zarr.dtypes import PACKED
from dcp_zarr.errors import (
    CorruptionError,
    DcpZarrError,
    FormatError,
    UnsafeObjectError,
    UnsupportedTensorError,
)
from tests import processes
from tests.test_dtypes import DTYPES, every_pattern

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def save_pt(state, path):
    torch.save(state, path)


def save_older_pt(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_dcp(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)


def save_dcp_of_safetensors(state, path):
    writer = dcp.FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, no_dist=True)


def save_safetensors(state, path):
    safetensors.torch.save_file(state, path)


SAVERS = {
    "pt": save_pt,
    "older pt": save_older_pt,
    "dcp": save_dcp,
    "dcp of safetensors": save_dcp_of_safetensors,
    "safetensors": save_safetensors,
}
NESTED = ["pt", "older pt", "dcp"]


def holds(name, saver):
    """Say whether a format holds a dtype."""
    if "safetensors" in saver:
        return name in TORCH_DTYPES.values()
    return saver != "older pt" or name not in {"uint16", "uint32", "uint64"} | set(PACKED)


def bits(tensor):
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


CASES = [(name, saver) for name in DTYPES for saver in SAVERS if holds(name, saver)]


@pytest.mark.parametrize(("name", "saver"), CASES)
def test_every_dtype_comes_bit_for_bit(name, saver):
    saved = every_pattern(name)
    SAVERS[saver]({"w": saved}, "x")
    found = dcp_zarr.open_checkpoint("x")["w"][...]
    assert found.dtype == saved.dtype
    assert found.shape == saved.shape
    assert torch.equal(found.view(torch.uint8), saved.view(torch.uint8))


W = torch.arange(60.0).reshape(6, 10)
TENSORS = {
    "transposed": W.t(),
    "a slice": W[1:5:2, 3:7],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "a view of a shared storage": W[2:4],
    "one number": torch.tensor(3.5),
    "nothing": torch.zeros(0, 3),
    "a parameter": torch.nn.Parameter(torch.ones(3, 4)),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "wide rows": torch.arange(3 << 20).reshape(3, 1 << 20),
}


@pytest.mark.parametrize("saver", NESTED)
@pytest.mark.parametrize("saved", TENSORS.values(), ids=TENSORS)
def test_tensors_come_whole_and_in_part_however_they_lie(saver, saved):
    SAVERS[saver]({"a": W, "w": saved}, "x")
    tensor = dcp_zarr.open_checkpoint("x")["w"]
    assert torch.equal(tensor[...], saved)
    if saved.ndim:
        assert torch.equal(tensor[1:, ..., 1:3], saved[1:, ..., 1:3])


STATE = {
    "model": OrderedDict(w=torch.ones(2), b=torch.zeros(3)),
    "optim": {"groups": [{"lr": 0.1, "params": [0, 1]}], "moments": [torch.ones(2), {"v": W}]},
    "step": 7,
    "betas": (0.9, 0.95),
    "names": {"a", "b"},
    "nothing": None,
    "nan": float("nan"),
}


@pytest.mark.parametrize("saver", NESTED)
def test_a_nested_state_dict_has_the_names_and_the_nesting_that_it_had(saver):
    SAVERS[saver](STATE, "x")
    with dcp_zarr.open_checkpoint("x") as opened:
        tensors = ["model.w", "model.b", "optim.moments.0", "optim.moments.1.v"]
        assert list(opened) == tensors
        assert (opened.objects["step"], opened.objects["betas"]) == (7, (0.9, 0.95))
        assert opened.objects["names"] == {"a", "b"}
        assert opened.verify() == []
    loaded = dcp_zarr.load("x")
    assert torch.equal(loaded["optim"]["moments"][1]["v"], W)
    assert loaded["optim"]["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert loaded["nan"] != loaded["nan"]


def test_a_tensor_alone_and_a_list_of_them_are_opened_too():
    torch.save(W, "one.pt")
    torch.save([W, W + 1], "two.pt")
    assert torch.equal(dcp_zarr.open_checkpoint("one.pt")["tensor"][...], W)
    assert list(dcp_zarr.open_checkpoint("two.pt")) == ["0", "1"]


def test_numpy_numbers_in_a_file_of_torch_are_python_numbers():
    torch.save({"best": np.float64(3.25), "epoch": np.int32(4), "done": np.bool_(True)}, "x.pt")
    assert dict(dcp_zarr.open_checkpoint("x.pt").objects) == {
        "best": 3.25,
        "epoch": 4,
        "done": True,
    }


def save_mesh(rank, count, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state = {
        "rows and columns": distribute_tensor(whole(), mesh, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(whole(), mesh["tp"], [Shard(0)]),
        "columns": distribute_tensor(whole(), mesh["fsdp"], [Shard(1)]),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=path)


def whole():
    return torch.arange(101 * 37.0).reshape(101, 37)


@pytest.mark.dist
def test_what_four_ranks_saved_with_torch_comes_as_whole_tensors(tmp_path):
    processes.run(4, tmp_path, save_mesh, "x")
    with dcp_zarr.open_checkpoint(tmp_path / "x") as opened:
        for fqn in ("rows and columns", "rows", "columns"):
            assert torch.equal(opened[fqn][...], whole())
            assert torch.equal(opened[fqn][49:53, 17:21], whole()[49:53, 17:21])
        assert len(opened["rows and columns"].regions) == 4
        assert opened.objects["step"] == 3


def test_the_metadata_of_torchs_directory_is_told_as_torch_tells_it():
    save_dcp(STATE, "x")
    expected = dcp.FileSystemReader("x").read_metadata()
    found = dcp_zarr.ZarrStorageReader("x").read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data


@pytest.mark.parametrize("saver", SAVERS)
def test_a_model_is_loaded_from_it(saver):
    saved = torch.nn.Linear(3, 4)
    SAVERS[saver](dict(saved.state_dict()), "x")
    target = torch.nn.Linear(3, 4)
    dcp_zarr.load_into(target, "x")
    assert torch.equal(target.weight, saved.weight)


def test_formats_are_compared_with_each_other():
    state = {"w": W, "b": torch.ones(3).bfloat16()}
    save_safetensors(state, "x.safetensors")
    torch.save({**state, "w": W + 1}, "y.pt")
    dcp_zarr.save(state, "z.zarr")
    ours, theirs, other = map(dcp_zarr.open_checkpoint, ("z.zarr", "x.safetensors", "y.pt"))
    assert {row.change for row in ours.diff(theirs)} == {"equal"}
    changed = {row.fqn: row.max_abs for row in theirs.diff(other) if row.change == "values"}
    assert changed == {"w": 1.0}


def save_directory(path, files, weight_map=None):
    Path(path).mkdir()
    for name, state in files.items():
        save_safetensors(state, f"{path}/{name}")
    if weight_map is not None:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        Path(path, "model.safetensors.index.json").write_text(json.dumps(index))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("weight_map", [None, {"b": TWO, "a": ONE}])
def test_a_hugging_face_directory_is_one_checkpoint(weight_map):
    save_directory("x", {ONE: {"a": W}, TWO: {"b": W + 1}}, weight_map)
    with dcp_zarr.open_checkpoint("x") as opened:
        assert sorted(opened) == ["a", "b"]
        assert torch.equal(opened["b"][3], W[3] + 1)


DIRECTORIES = {
    "a missing file": ({ONE: {"a": W}}, {"a": ONE, "b": TWO}, "is missing, or no file"),
    "a missing tensor": ({ONE: {"a": W}}, {"a": ONE, "b": ONE}, "Tensor 'b' is not in"),
    "a file outside": ({ONE: {"a": W}}, {"a": "../x.safetensors"}, "outside of the directory"),
    "a tensor twice, of two sizes": (
        {ONE: {"a": W}, TWO: {"a": W[:2]}},
        None,
        "Tensor 'a' is in several files",
    ),
    "a tensor twice": ({ONE: {"a": W}, TWO: {"a": W}}, None, "Tensor 'a' is in several files"),
}


@pytest.mark.parametrize(("files", "told", "message"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_that_contradicts_itself_is_refused(files, told, message):
    save_directory("x", files, told)
    with pytest.raises(DcpZarrError, match=message):
        dcp_zarr.open_checkpoint("x")


def test_several_indexes_and_an_index_that_is_none_are_refused():
    save_directory("x", {ONE: {"a": W}}, {"a": ONE})
    Path("x/model.safetensors.index.json").write_text("[]")
    with pytest.raises(FormatError, match="is no index of safetensors"):
        dcp_zarr.open_checkpoint("x")
    Path("x/other.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match="has several indexes"):
        dcp_zarr.open_checkpoint("x")


def save_parts(path, parts):
    """Save as `HuggingFaceStorageWriter` does: a file for each rank."""
    Path(path).mkdir()
    for number, (offsets, tensor) in enumerate(parts):
        told = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
        safetensors.torch.save_file({"w": tensor}, f"{path}/{number}.safetensors", metadata=told)


def test_files_of_ranks_that_hold_parts_are_put_together():
    save_parts("x", [([0, 0], W[:4].clone()), ([4, 0], W[4:].clone())])
    with dcp_zarr.open_checkpoint("x") as opened:
        assert torch.equal(opened["w"][...], W)
        assert len(opened["w"].regions) == 2


def test_a_part_is_not_taken_for_the_whole():
    save_parts("x", [([0, 0], W[:3].clone()), ([4, 0], W[4:].clone())])
    for path in ("x", "x/1.safetensors"):
        with pytest.raises(CorruptionError, match="Tensor 'w' is not whole"):
            dcp_zarr.open_checkpoint(path)


def test_a_header_that_tells_of_many_items_is_read_once(monkeypatch):
    save_dcp_of_safetensors({str(number): W + number for number in range(20)}, "x")
    reads, real = [], json.loads
    monkeypatch.setattr(json, "loads", lambda *a, **k: reads.append(1) or real(*a, **k))
    assert len(dcp_zarr.load("x")) == 20
    assert len(reads) == 2  # the header, and what of it is text of its own


@pytest.mark.parametrize("saver", ["pt", "older pt", "dcp", "safetensors"])
def test_a_row_reads_little_of_a_large_tensor(saver, monkeypatch):
    SAVERS[saver]({"w": torch.zeros(4096, 1024)}, "x")
    read, real = [], os.preadv

    def preadv(fd, buffers, offset):
        read.append(real(fd, buffers, offset))
        return read[-1]

    opened = dcp_zarr.open_checkpoint("x")
    monkeypatch.setattr(os, "preadv", preadv)
    opened["w"][1000]
    assert sum(read) < 1.2 * (1 << 20)


@pytest.mark.parametrize("saver", SAVERS)
def test_torch_is_not_needed(saver):
    SAVERS[saver]({"w": W}, "x")
    program = """
        import sys
        sys.modules["torch"] = None
        import numpy as np, dcp_zarr
        with dcp_zarr.open_checkpoint("x") as opened:
            print(np.asarray(opened["w"]).sum(), opened.params, opened.stats()[0].max)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "1770.0 60 59.0\n"


def test_the_command_line_opens_them(capsys, monkeypatch):
    torch.save(STATE, "x.pt")
    monkeypatch.setattr(sys, "argv", ["dcp-zarr", "show", "x.pt", "optim.moments.1.v[2, :3]"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "[20. 21. 22.]" in capsys.readouterr().out


def test_the_command_line_prints_an_object_that_json_has_not(capsys, monkeypatch):
    torch.save({"names": [{(1, 2): {3}}]}, "x.pt")
    monkeypatch.setattr(sys, "argv", ["dcp-zarr", "show", "--json", "x.pt", "names"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == '[{"(1, 2)": "{3}"}]\n'


def test_a_damaged_object_is_an_error_of_ours():
    save_dcp({"o": (1,)}, "x")
    (file,) = Path("x").glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"PK\5\6", b"PK\5\7"))
    with pytest.raises(CorruptionError, match="Object 'o' is damaged"):
        dcp_zarr.load("x")


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def test_code_in_a_file_is_shown_and_not_run():
    evil = Evil(os.system, "touch was-run")
    torch.save({"w": W, "args": Namespace(lr=1), "evil": evil, "deep": [{"x": evil}]}, "x.pt")
    with dcp_zarr.open_checkpoint("x.pt") as opened:
        assert torch.equal(opened["w"][...], W)
        assert "an object of posix.system" in str(opened.tree())
        message = (
            "Object 'args' in 'x.pt' is an object of argparse.Namespace; nothing in such a file"
        )
        with pytest.raises(UnsafeObjectError, match=message):
            opened.objects["args"]
    with pytest.raises(UnsafeObjectError):
        dcp_zarr.load("x.pt")
    assert not Path("was-run").exists()


@pytest.mark.parametrize("saver", NESTED)
def test_code_alone_in_a_file_is_refused(saver):
    SAVERS[saver]({"w": W}, "x")
    evil = Evil(os.system, "touch was-run")
    if saver == "dcp":
        Path("x/.metadata").write_bytes(pickle.dumps(evil))
    else:
        SAVERS[saver](evil, "x")
    with pytest.raises(FormatError, match="posix.system"):
        dcp_zarr.open_checkpoint("x")
    assert not Path("was-run").exists()


def test_code_in_torchs_metadata_is_not_run():
    save_dcp({"w": W}, "x")
    metadata = pickle.loads(Path("x/.metadata").read_bytes())
    metadata.storage_meta.modules = [Evil(os.system, "touch was-run")]
    Path("x/.metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(dcp_zarr.open_checkpoint("x")["w"][...], W)
    assert not Path("was-run").exists()


def called(name, argument):
    """Return opcodes that call a global with one argument."""
    module, _, function = name.rpartition(".")
    return b"c%s\n%s\n" % (module.encode(), function.encode()) + argument + b"\x85R"


TWICE = b")" + b"2\x86" * 60 + b""
"""A tuple that holds a tuple twice, and so on: to walk through it takes for ever."""
DEEP = b")" + b"\x85" * 3_000_000
"""A tuple in a tuple, and so on: to hash it overflows the stack."""
MANY = b"]q\x00(" + b"K\x01" * 60_000 + b"e0h\x00\x85q\x010"
"""A long list, at 0, and a tuple of it, at 1."""
A_STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
FLAGS = (
    b"(}q\x00(" + b"".join(b"J%s\x89" % number.to_bytes(4, "little") for number in range(60_000))
    + b"u0ctorch._tensor\n_rebuild_from_type_v2\nq\x010(ctorch._utils\n_rebuild_tensor_v2\nN("
    + A_STORAGE + b"K\0))h\x00ttq\x020("
)  # fmt: skip

HOSTILE = {
    "a list copied by many calls": b"(" + MANY + b"(" + b"ctorch\nSize\nh\x01R" * 99999 + b"l.",
    "a list copied by many objects": MANY + b"cbuiltins\nfrozenset\nq\x020("
    + b"h\x02h\x01\x81" * 60_000 + b"l.",
    "arguments copied by many calls": b"(" + b"K\x01" * 60_000 + b"tq\x000cos\nsystem\nq\x010("
    + b"h\x01h\x00R" * 60_000 + b"l.",
    "flags that many tensors share": FLAGS + b"h\x01h\x02R" * 60_000 + b"ll.",
    "a long name of a class, many times": b"(X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"q\x00"
    + b"h\x00h\x00\x93" * 200_000 + b"l.",
    "a long storage, many times": b"((X\x06\0\0\0moduleN" + b"K\x01" * 100_000
    + b"tq\x00" + b"h\x00Q" * 500_000 + b"l.",
    "a long name of many entries": b"}X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"}("
    + b"".join(b"M%sN" % number.to_bytes(2, "little") for number in range(65_000)) + b"us.",
    "a memo that is far away": b"K\x01r\xff\xff\xff\x7f.",
    "a long integer": b"\x8b\xff\xff\xff\x7f" + b"\x01" * 50 + b".",
    "an integer of many digits": b"}\x8b\x10\x27\x00\x00" + b"\x01" * 10_000 + b"Ns.",
    "bytes that are not there": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "an array of bytes that is not there": b"\x96\xff\xff\xff\xff\xff\x0f\x00\x00.",
    "an extension": b"\x82\x01.",
    "a change of a function": b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
    "lists in lists": b"]" + b"q\x00(h\x00h\x00h\x00h\x00l" * 500 + b".",
    "a dictionary that holds itself": b"}q\x00X\x01\x00\x00\x00ah\x00s.",
    "a list that holds itself": b"]q\x00h\x00a.",
    "a key of the same twice": b"}" + TWICE + b"Ns.",
    "keys of the same twice": b"}(" + TWICE + b"Nu.",
    "a member of the same twice": b"\x8f(" + TWICE + b"\x90.",
    "a frozen member of the same twice": b"(" + TWICE + b"\x91.",
    "a set made of the same twice": called("builtins.set", b"(" + TWICE + b"l") + b".",
    "a pair of the same twice": called("collections.OrderedDict", b"(" + TWICE + b"N\x86l") + b".",
    "a deep key": b"}" + DEEP + b"Ns.",
    "a device of the same twice": called("torch.device", TWICE) + b".",
    "a root of the same twice": TWICE + b".",
    "a shape of the same twice": b"ctorch._utils\n_rebuild_tensor_v2\n(" + A_STORAGE + b"K\0"
    + TWICE + b"))NtR.",
    "a storage of the same twice": b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + TWICE + b"NNtQ.",
    "a dtype of numpy that is none": called("numpy._core.multiarray.scalar", b"cnumpy\ndtype\n"
    + b"X\x06\0\0\0f8,)f8\x85R") + b".",
    "not hashable": b"}]K\x01s.",
    "an old way to call": b"(cos\nsystem\no.",
    "cut off": b"}X\x01",
}  # fmt: skip


@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_in_little_memory_and_time(pickled):
    with zipfile.ZipFile("x.pt", "w") as made:
        made.writestr("x/data.pkl", b"\x80\x04" + pickled)
    program = """
        import resource, dcp_zarr
        resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
        try:
            with dcp_zarr.open_checkpoint("x.pt") as opened:
                str(opened.tree())
                list(opened.objects.values())
        except dcp_zarr.DcpZarrError as error:
            print("refused", error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert found.stdout.startswith("refused")
    assert "MemoryError" not in found.stdout


@pytest.mark.parametrize("saver", ["pt", "older pt", "dcp", "dcp of safetensors", "safetensors"])
def test_a_file_cut_off_anywhere_is_an_error_of_ours(saver):
    SAVERS[saver]({"w": W, "v": W + 1}, "x")
    files = sorted(Path("x").iterdir()) if Path("x").is_dir() else [Path("x")]
    for file in files:
        content = file.read_bytes()
        for end in (*range(0, len(content) - 1, 1 + len(content) // 40), len(content) - 1):
            file.write_bytes(content[:end])
            with pytest.raises(DcpZarrError):
                touch_everything("x")
        file.write_bytes(content)
    touch_everything("x")


@pytest.mark.parametrize("saver", SAVERS)
def test_changed_bytes_are_read_or_an_error_of_ours(saver):
    SAVERS[saver]({"w": W, "v": W + 1} | ({"o": {1, 2}} if saver in NESTED else {}), "x")
    files = [file for file in (Path("x"), *Path("x").glob("*")) if file.is_file()]
    contents = {file: file.read_bytes() for file in files}
    dice = random.Random(saver)
    for _ in range(300):
        file = dice.choice(files)
        changed = bytearray(contents[file])
        for _ in range(dice.choice((1, 1, 8))):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(DcpZarrError):
            touch_everything("x")
            dcp_zarr.load("x")
        file.write_bytes(contents[file])


def touch_everything(path):
    with dcp_zarr.open_checkpoint(path) as opened:
        damage = opened.verify()
        if damage:
            raise CorruptionError(str(damage[0]))
        for tensor in opened.values():
            np.asarray(tensor)


def header(told):
    text = json.dumps(told).encode() if not isinstance(told, bytes) else told
    return len(text).to_bytes(8, "little") + text + bytes(16)


def of(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


HEADERS = {
    "an unknown dtype": (header(of("F6_E2M3")), "torch has not"),
    "bytes beyond the end": (header(of(shape=(8,), offsets=(0, 32))), "it was cut off or"),
    "other bytes than the shape says": (header(of(shape=(5,))), "not as many bytes"),
    "negative numbers": (header(of(shape=(-4,), offsets=(16, 0))), "no valid shape"),
    "more axes than there may be": (header(of(shape=(1,) * 64, offsets=(0, 4))), "no valid shape"),
    "more elements than there are": (
        header(of(shape=(1 << 61, 0), offsets=(0, 0)))[:-16],
        "any machine",
    ),
    "bytes before": (header(of(offsets=(4, 20))), "does not begin where"),
    "bytes behind": (header(of(shape=(3,), offsets=(0, 12))), "cut off or added to"),
    "nothing": (b"", "its header is cut off"),
    "a number that is true": (header(of("U8", (True,), (0, 1))), "no valid shape"),
    "no numbers": (header(of(offsets=("a", "b"))), "not valid safetensors"),
    "a list": (header([1]), "cut off|not valid"),
    "a name twice": (header(b'{"w":{},"w":{}}'), "stands twice"),
    "nested for ever": (header(b"{" + b'"a":[' * 100_000), "not valid safetensors"),
    "a header beyond the end": (b"\xff\xff\xff\x7f\0\0\0\0{}", "its header is cut off"),
}


@pytest.mark.parametrize(("content", "message"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_of_safetensors_is_refused(content, message):
    Path("x.safetensors").write_bytes(content)
    with pytest.raises((CorruptionError, UnsupportedTensorError), match=message):
        dcp_zarr.open_checkpoint("x.safetensors")


def damage_metadata(change):
    save_dcp({"w": W, "o": (1,)}, "x")
    metadata = pickle.loads(Path("x/.metadata").read_bytes())
    change(metadata)
    Path("x/.metadata").write_bytes(pickle.dumps(metadata))


def item(metadata, fqn="w"):
    return next(told for index, told in metadata.storage_data.items() if index.fqn == fqn)


METADATA = {
    "a path outside": (lambda m: vars(item(m)).update(relative_path="../x"), "lie outside of"),
    "an absolute path": (lambda m: vars(item(m)).update(relative_path="/etc/passwd"), "outside of"),
    "a path that is none": (lambda m: vars(item(m)).update(relative_path="x\0y"), "lie outside of"),
    "a long path": (lambda m: vars(item(m)).update(relative_path="x" * 300), "lie outside of"),
    "an object beyond the file": (
        lambda m: vars(item(m, "o")).update(length=1 << 60),
        "ends before object 'o' does",
    ),
    "more elements than there are": (
        lambda m: m.state_dict_metadata.update(
            w=dcp.metadata.TensorStorageMetadata(
                m.state_dict_metadata["w"].properties,
                torch.Size([1 << 40, 1 << 40]),
                m.state_dict_metadata["w"].chunks,
            )
        ),
        "any machine",
    ),
    "a region so far outside that its end is before it": (
        lambda m: (
            m.state_dict_metadata.update(
                w=dcp.metadata.TensorStorageMetadata(
                    m.state_dict_metadata["w"].properties,
                    torch.Size([6, 10]),
                    [ChunkStorageMetadata(torch.Size([2**63 - 1, 0]), torch.Size([6, 10]))],
                )
            ),
            m.storage_data.update({MetadataIndex("w"): item(m)}),
        ),
        "no valid shape",
    ),
    "bytes before the file": (lambda m: vars(item(m)).update(offset=-1), "is not torch's"),
    "a transform": (
        lambda m: vars(item(m)).update(transform_descriptors=["zstd"]),
        "went through",
    ),
    "an item that is missing": (lambda m: m.storage_data.clear(), "is not torch's"),
    "no entries": (lambda m: vars(m).update(state_dict_metadata=None), "is not torch's"),
    "a region outside": (
        lambda m: m.state_dict_metadata.update(
            w=dcp.metadata.TensorStorageMetadata(
                m.state_dict_metadata["w"].properties,
                torch.Size([5, 10]),
                m.state_dict_metadata["w"].chunks,
            )
        ),
        "Tensor 'w' is not whole",
    ),
}


@pytest.mark.parametrize(("change", "message"), METADATA.values(), ids=METADATA)
def test_a_hostile_metadata_of_torch_is_refused(change, message):
    damage_metadata(change)
    with pytest.raises((FormatError, CorruptionError, UnsupportedTensorError), match=message):
        dcp_zarr.open_checkpoint("x")


def test_a_metadata_whose_tensors_share_their_regions_is_refused():
    def share(metadata):
        w = metadata.state_dict_metadata["w"]
        empty = ChunkStorageMetadata(torch.Size([6, 0]), torch.Size([0, 10]))
        w.chunks += [empty] * 20_000
        metadata.storage_data = {MetadataIndex(str(n)): item(metadata) for n in range(20_000)}
        metadata.state_dict_metadata = {str(n): w for n in range(20_000)}

    damage_metadata(share)
    with pytest.raises(FormatError, match="more regions than it tells of"):
        dcp_zarr.open_checkpoint("x")


def test_a_memory_format_that_is_told_in_another_way_is_left_out(monkeypatch):
    kind = dcp.metadata._MEM_FORMAT_ENCODING
    with monkeypatch.context() as patched:
        patched.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
        save_dcp({"w": W}, "x")
    assert torch.equal(dcp_zarr.open_checkpoint("x")["w"][...], W)


def test_an_item_that_is_not_what_the_metadata_says_is_an_error():
    save_dcp({"w": W, "v": torch.ones(3).double()}, "x")
    metadata = pickle.loads(Path("x/.metadata").read_bytes())
    first, second = item(metadata, "w"), item(metadata, "v")
    vars(first).update(vars(second))
    Path("x/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptionError, match=r"float64 \[3\] for tensor 'w', expected float32"):
        np.asarray(dcp_zarr.open_checkpoint("x")["w"])


def test_a_file_that_was_replaced_is_not_mixed_with_the_new_one():
    torch.save({"w": W}, "x.pt")
    opened = dcp_zarr.open_checkpoint("x.pt")
    torch.save({"w": W + 1, "more": W}, "x.pt")
    with pytest.raises(CorruptionError, match="was replaced after it was opened"):
        opened["w"][0]


def test_a_directory_that_was_overwritten_is_not_mixed_with_the_new_one():
    save_dcp({"w": W}, "x")
    opened = dcp_zarr.open_checkpoint("x")
    shutil.rmtree("x")
    save_dcp({"w": W + 1}, "x")
    with pytest.raises(CorruptionError, match="was replaced after it was opened"):
        opened["w"][0]


def test_hosts_that_see_a_file_on_another_device_agree_on_what_they_read():
    save_safetensors({"w": W}, "x.safetensors")
    shutil.copy2("x.safetensors", "y.safetensors")
    x, y = (open_source(path).schema.save_id for path in ("x.safetensors", "y.safetensors"))
    assert x == y


def test_a_list_of_planner_data_is_no_longer_than_the_checkpoint():
    damage_metadata(lambda m: m.planner_data.update(w=("a", 1 << 40)))
    assert list(dcp_zarr.load("x")) == ["w", "o"]


def test_a_place_that_holds_none_is_told_what_would_be_one():
    Path("x").mkdir()
    Path("x/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(dcp_zarr.CheckpointNotFoundError, match="no .metadata of torch and no safe"):
        dcp_zarr.open_checkpoint("x")
    with pytest.raises(FormatError, match="nor one of torch or safetensors"):
        dcp_zarr.open_checkpoint("x/pytorch_model.bin")
    np.savez("x.npz", w=np.ones(3))
    with pytest.raises(FormatError, match="no data.pkl of torch.save in front"):
        dcp_zarr.open_checkpoint("x.npz")
    os.mkfifo("x/.metadata")
    os.mkfifo("x/model.safetensors")
    with pytest.raises(CorruptionError, match="is missing, or no file"):
        dcp_zarr.open_checkpoint("x")


def test_closed_is_closed():
    torch.save({"w": W}, "x.pt")
    opened = dcp_zarr.open_checkpoint("x.pt")
    opened.close()
    with pytest.raises(DcpZarrError, match="was closed"):
        opened["w"][0]


def test_two_entries_of_one_name_are_refused():
    torch.save({"a.b": W, "a": {"b": W}}, "x.pt")
    with pytest.raises(FormatError, match=r"Two entries of 'x.pt' are called 'a.b'"):
        dcp_zarr.open_checkpoint("x.pt")


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint32)


UNKNOWN = {
    "sparse": torch.eye(3).to_sparse(),
    "conjugated": torch.view_as_complex(torch.ones(3, 2)).conj(),
    "quantised": quantised(),
    "without storage": torch.ones(3, device="meta"),
    "expanded beyond all bounds": torch.ones(1).expand(1 << 40),
    "in a set": {W},
}


@pytest.mark.parametrize("saver", ["pt", "older pt"])
@pytest.mark.parametrize("tensor", UNKNOWN.values(), ids=UNKNOWN)
def test_tensors_that_are_not_strided_are_named_and_not_handed_out(tensor, saver):
    SAVERS[saver]({"w": W, "odd": tensor}, "x")
    with dcp_zarr.open_checkpoint("x") as opened:
        assert torch.equal(opened["w"][...], W)
        assert list(opened) == ["w"]
        assert opened.verify() == []
        with pytest.raises(UnsafeObjectError, match="Object 'odd'"):
            opened.objects["odd"]


class Text(dict):
    """A class that only this program knows."""


NOT_PLAIN = {
    "text of numpy": np.str_("abc"),
    "a date of numpy": np.datetime64("2020-01-01"),
    "a class": torch.nn.Linear,
    "a class that is known": OrderedDict,
    "a dictionary of its own class": Text(a=1),
    "the same again and again": [["abc"] * 1000] * 1000,
}


@pytest.mark.parametrize("value", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_an_object_that_is_not_plain_is_refused_alone(value):
    torch.save({"w": W, "odd": value}, "x.pt")
    with dcp_zarr.open_checkpoint("x.pt") as opened:
        assert torch.equal(opened["w"][...], W)
        with pytest.raises(UnsafeObjectError, match="Object 'odd'"):
            opened.objects["odd"]


PLAIN = {
    "no bytes": (b"", b""),
    "bytes": (b"a\xff", b"a\xff"),
    "a path": (Path("/a/b"), "/a/b"),
    "many": ([True] * 200_000, [True] * 200_000),
    "a key of parts": ([{(1, ("a", 2)): 3}], [{(1, ("a", 2)): 3}]),
    "a size": (W.shape, (6, 10)),
    "a dtype": ([torch.bfloat16], ["bfloat16"]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("saved", "expected"), PLAIN.values(), ids=PLAIN)
def test_plain_objects_come_as_they_are_in_every_protocol_of_pickle(saved, expected, protocol):
    torch.save({"w": W, "o": saved}, "x.pt", pickle_protocol=protocol)
    torch.save({"o": saved}, "y.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    for path in ("x.pt", "y.pt"):
        found = dcp_zarr.open_checkpoint(path).objects["o"]
        assert (found, type(found)) == (expected, type(expected))


def test_numbers_as_keys_of_a_dictionary_are_text_as_dcp_names_them():
    state = {140178894849152: {"v": W}, 0: {"v": W + 1}}
    torch.save({"state": state, "groups": [{"params": [0]}]}, "x.pt")
    loaded = dcp_zarr.load("x.pt")
    assert list(loaded["state"]) == ["140178894849152", "0"]
    assert torch.equal(loaded["state"]["0"]["v"], W + 1)
    assert loaded["groups"] == [{"params": [0]}]


def test_a_module_saved_whole_is_named_and_those_beside_it_are_opened():
    module = torch.nn.Linear(2, 2)
    for saver in (save_pt, save_older_pt):
        saver({"model": module, "w": W}, "x.pt")
        assert "model  an object of torch.nn.modules.linear.Linear" in str(
            dcp_zarr.open_checkpoint("x.pt").tree()
        )
        saver(module, "x.pt")
        with pytest.raises(
            FormatError, match=r"an object of torch.nn.modules.linear.Linear, not a"
        ):
            dcp_zarr.open_checkpoint("x.pt")


def test_a_file_of_torchscript_is_named():
    with zipfile.ZipFile("x.pt", "w") as made:
        made.writestr("x/data/0", bytes(64))
        made.writestr("x/data.pkl", b"\x80\x02c__torch__\nModel\n)\x81}b.")
    with pytest.raises(FormatError, match="an object of __torch__.*, not a state dict"):
        dcp_zarr.open_checkpoint("x.pt")


def test_the_name_of_a_class_can_be_printed():
    name = b"\x1b[31mred\nlines"
    pickled = b"\x80\x04}X\x01\0\0\0a\x8c\x02os\x8c" + bytes([len(name)]) + name + b"\x93)Rs."
    with zipfile.ZipFile("x.pt", "w") as made:
        made.writestr("x/data.pkl", pickled)
    assert r"an object of os.\x1b[31mred\nlines" in str(dcp_zarr.open_checkpoint("x.pt").tree())


def entry_of_size(size):
    """Save a tensor, and say in the zip file's directory that an entry has that size."""
    torch.save({"w": W}, "y.pt")
    with zipfile.ZipFile("y.pt") as old, zipfile.ZipFile("x.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        for entry in new.filelist:
            if entry.filename.endswith(size[0]):
                entry.file_size = entry.compress_size = size[1]


SIZES = [
    (name, size) for name in ("data.pkl", "data/0", "byteorder") for size in (1 << 33, 2**64 - 1)
]


@pytest.mark.parametrize("size", SIZES)
def test_an_entry_of_a_zip_file_that_says_it_is_larger_than_the_file_is_cut_off(size):
    entry_of_size(size)
    with pytest.raises(CorruptionError, match="in it is cut off"):
        dcp_zarr.open_checkpoint("x.pt")


def test_an_entry_that_would_be_inflated_is_refused():
    with zipfile.ZipFile("x.pt", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x/data.pkl", pickle.dumps({}), zipfile.ZIP_STORED)
        made.writestr("x/byteorder", bytes(1 << 30))
    with pytest.raises(FormatError, match="is deflated"):
        dcp_zarr.open_checkpoint("x.pt")


@pytest.mark.parametrize("keys", [5, None, [["0"]], [("0",)], {"0": 1}])
def test_a_list_of_storages_that_is_none_is_refused(keys):
    magic = torch.serialization.MAGIC_NUMBER
    Path("x.pt").write_bytes(
        b"".join(pickle.dumps(part, 2) for part in (magic, 1001, {}, {}, keys))
    )
    with pytest.raises(FormatError, match="no list of storages|is no key of a storage"):
        dcp_zarr.open_checkpoint("x.pt")
