"""Exports, as the safetensors library reads them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import dcp_zarr
from dcp_zarr.errors import (
    CheckpointExistsError,
    CorruptionError,
    OptionError,
    SaveError,
    TensorNotFoundError,
    UnsupportedTensorError,
)
from dcp_zarr.safetensors_format import NAMES
from tests import ranks

OUT = "out.safetensors"


def raw(tensor):
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {
        "model": {"embed": torch.randn(50, 8).bfloat16(), "head": torch.randn(3, 5)},
        "step": 7,
        "betas": (0.9, 0.95),
    }


@pytest.mark.parametrize("destination", ["out.safetensors", "out"])
def test_what_was_exported_opens_as_the_same_checkpoint(destination, path):
    state = {f"layers.{n}.w": torch.randn(40, 30).bfloat16() for n in range(4)}
    dcp_zarr.save({"model": state, "step": 3}, path)
    file_bytes = None if destination.endswith("s") else 5000
    dcp_zarr.export(path, destination, "model", file_bytes=file_bytes)
    with dcp_zarr.open_checkpoint(path) as saved, dcp_zarr.open_checkpoint(destination) as again:
        assert {row.change for row in saved.select("model").diff(again)} == {"equal"}


def beside(path):
    """Return what stands in the folder, but for the checkpoint."""
    return sorted(found.name for found in Path().iterdir() if found.name != path)


def test_one_file_holds_all_tensors_and_the_report_says_what_is_left_out(state, path):
    dcp_zarr.save(state, path)
    report = dcp_zarr.export(path, OUT)
    loaded = load_file(OUT)
    assert report.files == (OUT,)
    assert report.tensors == {name: name for name in loaded}
    assert report.left_out == ("step", "betas")
    assert repr(report) == f"ExportReport: 2 tensors in {OUT!r}, left out: 2"
    for name, tensor in state["model"].items():
        assert torch.equal(loaded[f"model.{name}"], tensor)
    with safe_open(OUT, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 0), (4, 6)])
def test_every_dtype_comes_bit_for_bit(name, shape):
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.arange(count, dtype=torch.uint8) * 37 + 240  # some are NaN, with payloads
    if name == "bool":
        bits %= 2
    saved = bits.view(dtype).reshape(shape)
    dcp_zarr.save({"w": saved, "odd": torch.ones(3, dtype=torch.uint8)}, "x.zarr")
    dcp_zarr.export("x.zarr", OUT)
    loaded = load_file(OUT)["w"]
    assert loaded.dtype == dtype
    packed_alone = name == "float4_e2m1fn_x2" and shape == ()  # two values need an axis
    assert loaded.shape == ((1,) if packed_alone else shape)
    assert raw(loaded) == bits.tolist()


def test_payloads_of_nan_and_minus_zero_survive(path):
    bits = torch.tensor([0x7FC12345, 0x80000000 - 2**32, 0x7F800001, 0xFF80FFFF - 2**32])
    saved = bits.int().view(torch.float32)
    dcp_zarr.save({"w": saved}, path)
    dcp_zarr.export(path, OUT)
    assert raw(load_file(OUT)["w"]) == raw(saved)


def test_tensors_that_ranks_cut_across_are_put_together(monkeypatch):
    monkeypatch.setattr("dcp_zarr.tasks._TASK_BYTES", 64)
    wide = torch.arange(7 * 50 * 6.0).reshape(7, 50, 6)
    states = [{"w": part} for part in ranks.parts(wide, (2, 3, 2))]
    options = {"read_chunk_bytes": 64, "sync_files": False}
    ranks.save(lambda: dcp_zarr.ZarrStorageWriter("x.zarr", **options), states)
    dcp_zarr.export("x.zarr", OUT)
    assert torch.equal(load_file(OUT)["w"], wide)


def test_names_are_the_callers(state, path):
    dcp_zarr.save(state, path)
    named = {"model.embed": "embed.weight"}
    report = dcp_zarr.export(path, OUT, names=named.get)
    assert list(load_file(OUT)) == ["embed.weight"]
    assert report.tensors == named
    assert report.left_out == ("model.head", "step", "betas")


def test_a_pattern_or_a_selection_exports_a_part(state, path):
    dcp_zarr.save(state, path)
    checkpoint = dcp_zarr.open_checkpoint(path)
    report = dcp_zarr.export(checkpoint, OUT, "model.h*")
    assert list(load_file(OUT)) == ["model.head"]
    assert report.left_out == ()
    dcp_zarr.export(checkpoint.select("model.embed"), OUT, overwrite=True)
    assert list(load_file(OUT)) == ["model.embed"]
    assert checkpoint["model.embed"].shape == (50, 8)  # it is still open


def test_a_directory_of_one_file_is_as_hugging_face_has_it(state, path):
    dcp_zarr.save(state, path)
    report = dcp_zarr.export(path, "out")
    assert report.files == ("out/model.safetensors",)
    assert [found.name for found in Path("out").iterdir()] == ["model.safetensors"]


def test_a_directory_of_several_files_has_an_index(path):
    saved = {name: torch.full((10,), float(n)) for n, name in enumerate("abcd")}
    dcp_zarr.save({**saved, "large": torch.ones(1000), "e": torch.ones(3)}, path)
    report = dcp_zarr.export(path, "out", file_bytes=80)
    parts = [f"model-{n:05}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert report.files == tuple(f"out/{n}" for n in [*parts, "model.safetensors.index.json"])
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 1043}
    places = dict(zip(["a", "b", "c", "d", "large", "e"], [0, 0, 1, 1, 2, 3], strict=True))
    assert index["weight_map"] == {name: parts[n] for name, n in places.items()}
    for name, tensor in saved.items():
        assert torch.equal(load_file(f"out/{index['weight_map'][name]}")[name], tensor)


def test_a_directory_keeps_its_other_files(state, path):
    dcp_zarr.save(state, path)
    Path("out/deep").mkdir(parents=True)
    others = ["out/config.json", "out/deep/model.safetensors", "out/model-ema.safetensors"]
    for other in others:
        Path(other).write_text(other)
    dcp_zarr.export(path, "out", file_bytes=100)
    dcp_zarr.export(path, "out", overwrite=True)
    found = sorted(str(found) for found in Path("out").rglob("*"))
    assert found == sorted([*others, "out/deep", "out/model.safetensors"])
    assert [Path(other).read_text() for other in others] == others


def test_the_largest_elements_stand_first_so_that_all_are_aligned(path):
    dcp_zarr.save({"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2).double()}, path)
    dcp_zarr.export(path, OUT)
    content = Path(OUT).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert entries["b"]["data_offsets"] == [0, 16]
    assert entries["a"]["data_offsets"] == [16, 19]


def refused(state, error, message, *arguments, **options):
    """Expect an export to be refused, and to leave nothing behind."""
    dcp_zarr.save(state, "x.zarr")
    before = beside("x.zarr")
    with pytest.raises(error, match=message):
        dcp_zarr.export("x.zarr", *(arguments or [OUT]), **options)
    assert beside("x.zarr") == before


def test_two_tensors_of_one_name_are_refused():
    message = "'a' and 'b' would both be named 'w': change names"
    refused({"a": torch.ones(1), "b": torch.ones(1)}, OptionError, message, names=lambda _: "w")


def test_a_name_that_no_tensor_can_have_is_refused():
    message = "names gives '__metadata__' for 'a', which is no name of a tensor"
    state = {"a": torch.ones(1)}
    refused(state, OptionError, message, names=lambda _: "__metadata__")


def test_dtypes_that_safetensors_cannot_hold_are_named():
    state = {f"c{n}": torch.ones(1).to(torch.complex128) for n in range(5)}
    message = (
        r"cannot hold the dtype of 'c0' \(complex128\), 'c1' \(complex128\), 'c2' "
        r"\(complex128\) and 2 more. Have names give None"
    )
    refused(state, UnsupportedTensorError, message)
    refused({**state, "w": torch.ones(1)}, UnsupportedTensorError, message)
    dcp_zarr.export("x.zarr", OUT, names={"w": "w"}.get)


def test_a_checkpoint_without_tensors_is_refused():
    refused({"step": 7}, TensorNotFoundError, "No tensor of 'x.zarr' is selected")


def test_a_size_of_files_is_for_directories():
    state = {"w": torch.ones(1)}
    refused(state, OptionError, "'out.safetensors' names one file", file_bytes=100)
    refused(state, OptionError, "file_bytes=0 is not a whole number", "out", file_bytes=0)


@pytest.mark.parametrize("out", [OUT, "out"])
def test_what_exists_is_replaced_on_request_only(out, state):
    dcp_zarr.save(state, "x.zarr")
    dcp_zarr.export("x.zarr", out)
    refused({"w": torch.ones(1)}, CheckpointExistsError, f"'{out}' exists: choose another", out)
    dcp_zarr.export("x.zarr", out, overwrite=True)
    assert list(load_file(OUT if out == OUT else "out/model.safetensors")) == ["w"]


def test_what_no_export_wrote_is_never_replaced():
    message = "is nothing that an export may replace"
    Path(OUT).mkdir()
    refused({"w": torch.ones(1)}, CheckpointExistsError, message, overwrite=True)
    Path("out").write_text("a file")
    refused({"w": torch.ones(1)}, CheckpointExistsError, message, "out", overwrite=True)
    refused({"w": torch.ones(1)}, CheckpointExistsError, message, "x.zarr", overwrite=True)


@pytest.mark.parametrize("out", [OUT, "out"])
def test_damage_leaves_what_was_there_before(out, state):
    dcp_zarr.save(state, "x.zarr")
    dcp_zarr.export("x.zarr", out)
    file = Path(OUT if out == OUT else "out/model.safetensors")
    before = file.read_bytes()
    with open("x.zarr/model/head/c.0.0", "r+b") as damaged:
        damaged.write(b"\xff\xff")
    with pytest.raises(CorruptionError, match="Tensor 'model.head'"):
        dcp_zarr.export("x.zarr", out, overwrite=True)
    assert file.read_bytes() == before
    assert list(Path().rglob("*model*safetensors*")) == ([] if out == OUT else [file])
    with pytest.raises(CorruptionError, match="Tensor 'model.head'"):
        dcp_zarr.export("x.zarr", f"new-{out}")
    assert beside("x.zarr") == [out]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    message = "The export takes 400 B, but at '.*' are only 100 B free. Nothing was written."
    refused({"w": torch.ones(100)}, SaveError, message)


def limited_to_a_million_bytes():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


def test_a_file_that_cannot_grow_leaves_nothing_behind(path):
    dcp_zarr.save({"w": torch.zeros(500_000)}, path)
    done = subprocess.run(
        [sys.executable, "-c", f"import dcp_zarr; dcp_zarr.export({path!r}, {OUT!r})"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited_to_a_million_bytes,
    )
    assert f"SaveError: The export to '{OUT}' was given up, and left nothing behind" in done.stderr
    assert beside(path) == []


def test_progress_counts_bytes(state, path):
    dcp_zarr.save(state, path)
    seen = []
    dcp_zarr.export(path, "out", file_bytes=100, progress=lambda *at: seen.append(at))
    assert seen == [(800, 860), (860, 860)]


def test_a_large_tensor_is_never_whole_in_memory(path):
    dcp_zarr.save({"w": torch.zeros(96 << 20, dtype=torch.uint8)}, path)
    tracemalloc.start()
    dcp_zarr.export(path, OUT, thread_count=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20


def test_torch_is_not_needed(state, path):
    dcp_zarr.save(state, path)
    program = "import sys; sys.modules['torch'] = sys.modules['zarr'] = None; import dcp_zarr; "
    program += f"dcp_zarr.export({path!r}, {OUT!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.equal(load_file(OUT)["model.head"], state["model"]["head"])
