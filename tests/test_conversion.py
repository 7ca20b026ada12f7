"""Checkpoints in other formats, as the other libraries read them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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
from tests import processes, ranks
from tests.test_dtypes import DTYPES, every_pattern
from tests.test_foreign import SAVERS, Evil

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

FORMATS = {
    "zarr": "out.zarr",
    "zarr-zip": "out.zarr.zip",
    "hdf5": "out.h5",
    "torch": "out.pt",
    "dcp": "out",
    "safetensors": "out.safetensors",
    "safetensors-directory": "out-of-files",
}
KEEP_OBJECTS = [name for name in FORMATS if not name.startswith("safetensors")]


def convert(source, name, pattern="", **options):
    """Convert to a format; return the path."""
    dcp_zarr.convert(source, FORMATS[name], pattern, to=name, **options)
    return FORMATS[name]


def changes(first, second):
    with dcp_zarr.open_checkpoint(first) as one, dcp_zarr.open_checkpoint(second) as two:
        return {row.change for row in one.diff(two)}


def loaded_by_others(name):
    """Return the tensors in a converted checkpoint by what its own library reads."""
    if name == "torch":
        return torch.load(FORMATS[name], weights_only=True)
    if name == "dcp":
        dcp_to_torch_save(FORMATS[name], "by-torch.pt")
        return torch.load("by-torch.pt", weights_only=True)
    if name == "safetensors":
        return load_file(FORMATS[name])
    if name == "safetensors-directory":
        return load_file(f"{FORMATS[name]}/model.safetensors")
    return dcp_zarr.load(FORMATS[name])


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_goes_there_and_back_bit_for_bit(name):
    held = [dtype for dtype in DTYPES if name in KEEP_OBJECTS or dtype in NAMES]
    saved = {dtype: every_pattern(dtype) for dtype in held}
    saved |= {f"none of {dtype}": tensor[:0] for dtype, tensor in saved.items()}
    dcp_zarr.save(saved, "x.zarr")
    dcp_zarr.convert(convert("x.zarr", name), "back.zarr")
    for found in (loaded_by_others(name), dcp_zarr.load("back.zarr")):
        assert {fqn: (t.dtype, t.shape) for fqn, t in found.items()} == {
            fqn: (t.dtype, t.shape) for fqn, t in saved.items()
        }
        assert [fqn for fqn in saved if not torch.equal(raw(found[fqn]), raw(saved[fqn]))] == []


def state():
    torch.manual_seed(0)
    return {
        "model": {"embed": torch.randn(50, 8).bfloat16(), "head": torch.randn(3, 5)},
        "moments": [torch.ones(3), {"v": torch.tensor(2.5)}],
        "nothing": torch.zeros(4, 0),
    }


OBJECTS = {
    "step": 7,
    "betas": (0.9, 0.95),
    "groups": [{"lr": 0.1, "params": [0, 1]}],
    "dtype": torch.bfloat16,
    "names": {"a"},
    "text": "é",
    "nan": float("nan"),
}


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_every_format_becomes_every_other(first, second):
    torch.save(state(), "x.pt")
    one = convert("x.pt", first)
    other = f"again-{FORMATS[second]}"
    report = dcp_zarr.convert(one, other, to=second)
    assert changes("x.pt", other) == {"equal"}
    assert (report.tensors, report.objects, report.nbytes) == (5, 0, 876)
    assert (report.left_out, report.format, report.path) == ({}, second, other)
    assert dcp_zarr.open_checkpoint(other).verify() == []


@pytest.mark.parametrize("name", KEEP_OBJECTS)
@pytest.mark.parametrize("saver", ["pt", "older pt", "dcp"])
def test_objects_and_nesting_are_kept(saver, name):
    saved = {**state(), **OBJECTS}
    SAVERS[saver](saved, "x")
    assert str(loaded_by_others(convert("x", name) and name)) == str(saved)


@pytest.mark.parametrize("saver", SAVERS)
def test_what_others_saved_becomes_ours(saver, path):
    saved = state()["model"]
    SAVERS[saver](saved, "x")
    dcp_zarr.convert("x", path)
    found = dcp_zarr.load(path)
    assert str({fqn: found[fqn] for fqn in saved}) == str(saved)


def test_a_file_of_torch_is_a_sound_zip_file(path):
    dcp_zarr.save(state(), path)
    with zipfile.ZipFile(convert(path, "torch")) as made:
        assert made.testzip() is None
        assert [entry.filename for entry in made.infolist() if "data/" in entry.filename]


def test_items_of_torchs_directory_are_sound_zip_files(path):
    dcp_zarr.save({**state(), "o": (1,)}, path)
    directory = convert(path, "dcp")
    content = Path(directory, "__0_0.distcp").read_bytes()
    metadata = dcp.FileSystemReader(directory).read_metadata()
    assert len(metadata.storage_data) == 6
    for lying in metadata.storage_data.values():
        part = Path("part.pt")
        part.write_bytes(content[lying.offset : lying.offset + lying.length])
        assert zipfile.ZipFile(part).testzip() is None


def test_a_parameter_requires_its_gradient_again(path):
    dcp_zarr.save({"w": torch.nn.Parameter(torch.ones(3))}, path)
    assert torch.load(convert(path, "torch"))["w"].requires_grad


def test_regions_and_properties_are_kept(path):
    whole = torch.arange(7 * 50 * 6.0).reshape(7, 50, 6)
    states = [{"w": part} for part in ranks.parts(whole, (2, 3, 1))]
    ranks.save(lambda: dcp_zarr.storage_writer(path, sync_files=False), states)
    saved = dcp_zarr.storage_reader(path).read_metadata()
    found = dcp.FileSystemReader(convert(path, "dcp")).read_metadata()
    assert found.state_dict_metadata == saved.state_dict_metadata
    assert len(found.state_dict_metadata["w"].chunks) == 6
    assert found.planner_data == saved.planner_data
    assert found.storage_meta.checkpoint_id == str(Path("out").resolve())
    for name in ("zarr", "zarr-zip", "hdf5"):
        again = dcp_zarr.open_checkpoint(convert("out", name)).metadata()
        assert again.state_dict_metadata == saved.state_dict_metadata
        assert again.planner_data == saved.planner_data
    target = {"w": torch.zeros(7, 50, 6)}
    dcp.load(target, checkpoint_id="out", no_dist=True)
    assert torch.equal(target["w"], whole)


def test_names_without_nesting_are_planned_as_a_flat_dict():
    torch.save({"w": torch.ones(2)}, "x.pt")
    convert(convert("x.pt", "safetensors"), "dcp")
    assert dcp.FileSystemReader("out").read_metadata().planner_data == {"w": ("w",)}


def test_stored_read_chunks_are_copied_as_they_are(path):
    dcp_zarr.save({"w": torch.randn(700, 300), "i": torch.arange(9)}, path, statistics=True)
    dcp_zarr.save({"w": torch.randn(2)}, "gzip.h5")
    other = "other.h5" if path.endswith(".h5") else "other.zarr.zip"
    assert dcp_zarr.convert(path, other).copied == 2
    with dcp_zarr.open_checkpoint(path) as one, dcp_zarr.open_checkpoint(other) as two:
        assert two["w"].stored_nbytes == one["w"].stored_nbytes
        assert two.verify() == []
        assert [*two.stats()] == [*one.stats()]
    assert changes(path, other) == {"equal"}
    assert dcp_zarr.convert(path, "anew" + other, compression=None).copied == 0
    assert changes(path, "anew" + other) == {"equal"}


def test_a_container_of_another_kind_is_compressed_as_a_save_would():
    dcp_zarr.save({"w": torch.randn(300, 200)}, "x.zarr", compression=None)
    dcp_zarr.convert("x.zarr", "x.h5")
    dcp_zarr.save(dcp_zarr.load("x.zarr"), "saved.h5")
    with dcp_zarr.open_checkpoint("x.h5") as one, dcp_zarr.open_checkpoint("saved.h5") as two:
        assert repr(one["w"]) == repr(two["w"])
    dcp_zarr.convert("x.h5", "again.zarr")
    assert "lz4" in repr(dcp_zarr.open_checkpoint("again.zarr")["w"])


def test_a_pattern_converts_a_part(path):
    dcp_zarr.save({**state(), **OBJECTS}, path)
    report = dcp_zarr.convert(path, "out.safetensors", "model")
    assert sorted(load_file("out.safetensors")) == ["model.embed", "model.head"]
    assert report.left_out == {}
    checkpoint = dcp_zarr.open_checkpoint(path)
    dcp_zarr.convert(checkpoint.select("moments"), "out.pt")
    assert torch.load("out.pt")["moments"][1]["v"] == 2.5
    assert checkpoint["nothing"].shape == (4, 0)  # it is still open
    with pytest.raises(TensorNotFoundError, match="'modle'"):
        dcp_zarr.convert(path, "other.pt", "modle")


def test_what_safetensors_cannot_hold_is_named():
    dcp_zarr.save({"a": torch.ones(2), "c": torch.ones(2).to(torch.complex128), "o": 3}, "x.zarr")
    message = r"cannot hold 'o' \(an object\), 'c' \(a tensor of complex128\) of 'x.zarr'. Nothing"
    for name in ("safetensors", "safetensors-directory"):
        with pytest.raises(UnsupportedTensorError, match=message):
            convert("x.zarr", name)
        assert os.listdir() == ["x.zarr"]
    report = dcp_zarr.convert("x.zarr", "out.safetensors", allow_loss=True)
    assert report.left_out == {"o": "an object", "c": "a tensor of complex128"}
    assert list(load_file("out.safetensors")) == ["a"]
    assert repr(report) == (
        "ConversionReport: 1 tensors and 0 objects in 'out.safetensors' (safetensors), left out: 2"
    )


def test_many_that_cannot_be_held_are_counted():
    dcp_zarr.save({"w": torch.ones(1), **{f"o{n}": n for n in range(12)}}, "x.zarr")
    with pytest.raises(UnsupportedTensorError, match=r"'o9' \(an object\) and 2 more of 'x.zarr'"):
        convert("x.zarr", "safetensors")
    with pytest.raises(TensorNotFoundError, match="Nothing of 'x.zarr' is left to convert"):
        convert("x.zarr", "safetensors", "o1", allow_loss=True)


def test_tensors_that_share_bytes_are_named():
    tied, other = torch.arange(12.0), torch.ones(2)
    torch.save({"in": tied, "out": tied, "part": tied[4:6], "other": other}, "x.pt")
    report = dcp_zarr.convert("x.pt", "x.zarr")
    assert report.separated == (("in", "out", "part"),)
    assert dcp_zarr.load("x.zarr")["part"].tolist() == [4, 5]
    assert dcp_zarr.convert("x.pt", "y.zarr", "out").separated == ()


def test_dicts_whose_keys_become_text_are_named():
    torch.save({"state": {0: {"v": torch.ones(2)}, 1: {"v": torch.ones(3)}}, "step": 1}, "x.pt")
    assert dcp_zarr.convert("x.pt", "x.zarr").keys_as_text == ("state",)
    assert [*dcp_zarr.load("x.zarr")["state"]] == ["0", "1"]
    assert dcp_zarr.convert("x.zarr", "y.pt").keys_as_text == ()


@pytest.mark.parametrize("name", KEEP_OBJECTS)
@pytest.mark.parametrize("saver", ["pt", "dcp"])
def test_code_is_not_run_but_named(saver, name):
    evil = Evil(os.system, "touch was-run")
    SAVERS[saver]({"w": torch.ones(3), "evil": evil, "fine": 1}, "x")
    refuses = saver == "pt" or name == "torch"  # as bytes it is kept, and refused on loading
    if refuses:
        with pytest.raises(UnsupportedTensorError, match=r"cannot hold 'evil' \(an object"):
            convert("x", name)
    report = dcp_zarr.convert("x", FORMATS[name], to=name, allow_loss=True)
    assert list(report.left_out) == ["evil"] * refuses
    assert changes("x", FORMATS[name]) == {"equal"}
    assert not Path("was-run").exists()


def test_the_destination_is_replaced_on_request_by_its_like_only(path):
    dcp_zarr.save({"w": torch.ones(3)}, path)
    for name, out in FORMATS.items():
        convert(path, name)
        with pytest.raises(CheckpointExistsError, match=f"'{out}' exists: choose another path, or"):
            convert(path, name)
        convert(path, name, overwrite=True)
        for other in FORMATS:
            if other != name:
                with pytest.raises(CheckpointExistsError, match="is no checkpoint of format"):
                    dcp_zarr.convert(path, out, to=other, overwrite=True)
        assert changes(path, out) == {"equal"}
    Path("out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="is no checkpoint of format 'dcp' alone"):
        convert(path, "dcp", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="'out.zarr/x.pt' is within a Zarr store"):
        dcp_zarr.convert(path, "out.zarr/x.pt")


def test_an_empty_directory_may_be_taken(path):
    dcp_zarr.save({"w": torch.ones(3)}, path)
    Path("out").mkdir()
    convert(path, "dcp", overwrite=True)
    assert changes(path, "out") == {"equal"}


def test_a_path_that_does_not_say_a_format_is_refused():
    dcp_zarr.save({"w": torch.ones(3)}, "x.zarr")
    with pytest.raises(OptionError, match="'out' does not say a format by its suffix; pass to="):
        dcp_zarr.convert("x.zarr", "out")
    with pytest.raises(OptionError, match="to='tar' is no format; those are zarr, zarr-zip, "):
        dcp_zarr.convert("x.zarr", "out", to="tar")
    for options in ({"compression": "small"}, {"read_chunk_bytes": 1 << 20}):
        message = "compression and read_chunk_bytes are for containers of ours"
        with pytest.raises(OptionError, match=message):
            dcp_zarr.convert("x.zarr", "out.pt", **options)


def damage(path):
    """Change the last byte of a tensor's values in a file."""
    (file,) = [path] if path.is_file() else path.glob("[!.]*")
    content = bytearray(file.read_bytes())
    at = content.rindex(torch.full((64,), 3.0).numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["torch", "dcp", "safetensors", "safetensors-directory"])
def test_a_result_that_differs_is_found_and_never_shown(name, monkeypatch):
    from dcp_zarr import conversion

    real = conversion.open_source
    monkeypatch.setattr(conversion, "open_source", lambda at: damage(Path(at)) or real(at))
    dcp_zarr.save({"w": torch.full((8, 8), 3.0)}, "x.zarr")
    message = r"Tensor 'w' is not the same in .* as in 'x.zarr': its values in \[0:8, 0:8\] differ"
    with pytest.raises(CorruptionError, match=message):
        convert("x.zarr", name)
    assert os.listdir() == ["x.zarr"]
    convert("x.zarr", name, verify=False)


def test_copies_that_differ_are_found(monkeypatch):
    from dcp_zarr import conversion

    dcp_zarr.save({"w": torch.ones(8, 8), "v": torch.ones(3)}, "x.zarr")
    dcp_zarr.save({"w": torch.zeros(8, 8), "v": torch.ones(3)}, "other.zarr")
    dcp_zarr.save({"v": torch.ones(3)}, "less.zarr")
    real = conversion.open_source
    for other, what in {"other": "read chunks", "less": "name, dtype or shape"}.items():
        monkeypatch.setattr(conversion, "open_source", lambda _, path=f"{other}.zarr": real(path))
        with pytest.raises(CorruptionError, match=f"Tensor 'w' is not the same .* its {what} diff"):
            convert("x.zarr", "zarr-zip")


@pytest.mark.parametrize("name", FORMATS)
def test_damage_in_the_source_leaves_nothing(name):
    dcp_zarr.save({"a": torch.ones(40), "model": torch.ones(3, 4)}, "x.zarr")
    with open("x.zarr/model/c.0.0", "r+b") as damaged:
        damaged.write(b"\xff\xff")
    with pytest.raises(CorruptionError, match=r"Tensor 'model' .*in 'x.zarr' cannot be read"):
        convert("x.zarr", name)
    assert os.listdir() == ["x.zarr"]


@pytest.mark.parametrize("name", FORMATS)
def test_progress_counts_what_is_written_and_compared(name, path):
    dcp_zarr.save(state(), path)
    seen = []
    convert(path, name, progress=lambda *at: seen.append(at))
    assert seen[-1] == (2 * 876, 2 * 876)
    assert seen == sorted(seen)


IN_LITTLE_MEMORY = """
    import json, re, sys
    from pathlib import Path
    import dcp_zarr

    def peak():
        return int(re.search("VmHWM:(.*)kB", Path("/proc/self/status").read_text())[1]) << 10

    def convert_all(size):
        for number, (name, path) in enumerate(json.loads(sys.argv[1]).items()):
            source = size + (".zarr", ".pt", ".h5")[number % 3]
            options = {"overwrite": True, "memory_budget_bytes": 16 << 20}
            dcp_zarr.convert(source, path, to=name, **options)

    convert_all("little")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    convert_all("large")
    print(peak() - before)
"""


def test_a_large_tensor_is_never_whole_in_memory():
    for name, count in {"little": 3, "large": 96 << 20}.items():
        torch.save({"w": torch.zeros(count, dtype=torch.uint8)}, f"{name}.pt")
        for container in ("zarr", "h5"):
            dcp_zarr.convert(f"{name}.pt", f"{name}.{container}", compression=None)
    program = [sys.executable, "-c", textwrap.dedent(IN_LITTLE_MEMORY), json.dumps(FORMATS)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 20


def test_torch_is_not_needed_between_our_containers_and_safetensors():
    torch.save({"w": torch.arange(6.0), "step": 7}, "x.pt")
    program = """
        import sys
        sys.modules["torch"] = None
        import dcp_zarr
        dcp_zarr.convert("x.pt", "x.zarr")
        dcp_zarr.convert("x.zarr", "x.h5")
        dcp_zarr.convert("x.h5", "x.safetensors", "w")
        dcp_zarr.convert("x.safetensors", "again.zarr.zip")
        dcp_zarr.repack("x.zarr", compression="small")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    assert torch.equal(dcp_zarr.load("again.zarr.zip")["w"], torch.arange(6.0))
    assert dcp_zarr.load("x.zarr")["step"] == 7


def test_repack_stores_anew_in_the_same_place(path):
    dcp_zarr.save({**state(), **OBJECTS}, path, read_chunk_bytes=64, statistics=True)
    before = dcp_zarr.load(path)
    report = dcp_zarr.repack(path, compression=None, read_chunk_bytes=1 << 20)
    assert report.path == path
    assert str(dcp_zarr.load(path)) == str(before)
    with dcp_zarr.open_checkpoint(path) as opened:
        assert opened.verify() == []
        assert "with none" in repr(opened["model.embed"])
        assert opened["model.embed"].stored_nbytes == 50 * 8 * 2 + 4  # one read chunk
        assert opened._schema.tensors["model.embed"].sums is not None
    assert os.listdir() == [path]
    assert dcp_zarr.repack(path).copied == 5


def test_repack_drops_what_is_not_kept(path):
    dcp_zarr.save({**state(), **OBJECTS}, path)
    dcp_zarr.repack(path, keep="model.*")
    assert list(dcp_zarr.load(path)) == ["model"]
    assert str(dcp_zarr.load(path)["model"]) == str(state()["model"])
    with pytest.raises(TensorNotFoundError, match="'optim'"):
        dcp_zarr.repack(path, keep="optim")
    assert list(dcp_zarr.load(path)) == ["model"]


@pytest.mark.parametrize("saver", SAVERS)
def test_repack_leaves_what_others_saved(saver):
    SAVERS[saver]({"w": torch.ones(2)}, "x")
    with pytest.raises(OptionError, match="'x' is no checkpoint of dcp_zarr, and stays as it is"):
        dcp_zarr.repack("x")


def test_a_disk_that_is_full_is_an_error_of_ours(monkeypatch, path):
    dcp_zarr.save({"w": torch.ones(300)}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwritev", full)
    for name in FORMATS:
        with pytest.raises(SaveError, match="was given up, and left nothing behind: .*No space"):
            convert(path, name)
        assert os.listdir() == [path]


def test_a_conversion_killed_anywhere_is_invisible_and_another_one_finishes(tmp_path):
    program = ["-m", "tests.crash_convert", str(tmp_path), "11"]
    program += [word for both in FORMATS.items() for word in both]
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == [*FORMATS]
    assert all(int(old) > 1 and int(new) > 0 for _, old, new in found)


def save_meshes(rank, count, path):
    """Save as FSDP2, tensor parallelism, both, and HSDP do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = {name: torch.nn.Linear(37, 101) for name in ("fsdp", "both", "hsdp")}
    plan = {"0": ColwiseParallel()}
    both = parallelize_module(torch.nn.Sequential(whole["both"]), mesh["tp"], plan)
    modules = {
        "fsdp": fully_shard(whole["fsdp"], mesh=init_device_mesh("cpu", (4,))),
        "both": fully_shard(both, mesh=mesh["dp"]),
        "hsdp": fully_shard(whole["hsdp"], mesh=mesh),
    }
    columns = torch.arange(101 * 37.0).reshape(101, 37)
    state = {name: module.state_dict() for name, module in modules.items()}
    state["tp"] = [distribute_tensor(columns, mesh["tp"], [Shard(1)])]
    dcp.save({**state, "step": 3, "betas": (0.9, 0.95)}, checkpoint_id=path)


@pytest.mark.dist
def test_what_four_ranks_saved_with_torch_keeps_its_metadata(tmp_path):
    processes.run(4, tmp_path, save_meshes, "x")
    saved = dcp.FileSystemReader("x").read_metadata()
    assert {len(saved.state_dict_metadata[f].chunks) for f in ("fsdp.weight", "tp.0")} == {2, 4}
    dcp_to_torch_save("x", "expected.pt")
    expected = torch.load("expected.pt")
    source = "x"
    for name in (*KEEP_OBJECTS, "dcp"):
        destination = f"{len(source)}-{FORMATS[name]}"
        if name != "torch":  # which has no regions
            dcp_zarr.convert(source, destination, to=name)
            reader = dcp.FileSystemReader if name == "dcp" else dcp_zarr.storage_reader
            found = reader(destination).read_metadata()
            assert found.state_dict_metadata == saved.state_dict_metadata
            assert found.planner_data == saved.planner_data
            source = destination
    assert changes("x", source) == {"equal"}
    dcp_to_torch_save(source, "found.pt")
    assert str(torch.load("found.pt")) == str(expected)
    dcp_zarr.convert(source, "direct.pt")
    assert str(torch.load("direct.pt")) == str(expected)


def test_code_in_torchs_metadata_is_not_run():
    SAVERS["dcp"]({"w": torch.ones(3)}, "x")
    metadata = pickle.loads(Path("x/.metadata").read_bytes())
    metadata.storage_meta.modules = [Evil(os.system, "touch was-run")]
    Path("x/.metadata").write_bytes(pickle.dumps(metadata))
    for name in FORMATS:
        assert changes("x", convert("x", name)) == {"equal"}
    assert not Path("was-run").exists()


@pytest.mark.parametrize("suffix", [".zarr", ".h5", ".pt", ".safetensors"])
def test_a_place_where_no_directory_can_be_is_said_to_be_so(suffix):
    dcp_zarr.save({"w": torch.ones(1)}, "x.zarr")
    Path("file").touch()
    with pytest.raises(SaveError, match=f"The conversion to 'file/y{suffix}' was given up, .*file"):
        dcp_zarr.convert("x.zarr", f"file/y{suffix}")


def test_an_empty_dict_is_kept_as_a_value():
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "lr": 0.1}}
    torch.save(state, "x.pt")
    for destination in ("x.zarr", "x.h5", "y.pt"):
        dcp_zarr.convert("x.pt", destination)
        assert dcp_zarr.load(destination)["optimizer"] == {"state": {}, "lr": 0.1}
    assert torch.load("y.pt")["optimizer"] == {"state": {}, "lr": 0.1}
