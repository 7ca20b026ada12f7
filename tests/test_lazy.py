"""Opening reads one document; a slice reads what it must; torch stays out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_zarr
from dcp_zarr.errors import OptionError, TensorNotFoundError


@pytest.fixture
def checkpoint(path):
    state = {
        "model": {"layers": [{"w": torch.arange(24.0).reshape(4, 6)}, {"w": torch.ones(2)}]},
        "step": 7,
        "betas": (0.9, 0.95),
    }
    dcp_zarr.save(state, path)
    return dcp_zarr.open_checkpoint(path)


@pytest.mark.parametrize("path", ["x.zarr"])
def test_opening_listing_and_drawing_read_the_root_alone(checkpoint, reads):
    opened = dcp_zarr.open_checkpoint("x.zarr")
    assert list(opened) == ["model.layers.0.w", "model.layers.1.w"]
    repr(opened)
    str(opened.tree())
    opened._repr_html_()
    repr(opened["model.layers.0.w"])
    assert opened["model.layers.0.w"].shape == (4, 6)
    assert opened.objects["step"] == 7
    assert {path for path, _ in reads} == {"zarr.json"}
    assert len(reads) == 1


@pytest.mark.parametrize("compression", [None, "fast"])
def test_one_row_of_a_large_tensor_reads_8_mib_at_most(reads, compression, path):
    dcp_zarr.save({"w": torch.zeros(125_000, 1000)}, path, compression=compression)
    reads.clear()
    row = dcp_zarr.open_checkpoint(path)["w"][60_000]
    assert row.shape == (1000,)
    assert sum(nbytes for _, nbytes in reads) <= 8 << 20
    if compression is None:
        assert sum(nbytes for _, nbytes in reads) <= 1.1 * (1 << 20)


@pytest.mark.parametrize("path", ["x.zarr"])
def test_a_part_reads_no_other_array(checkpoint, reads):
    dcp_zarr.load("x.zarr", "model.layers.1")
    assert {path.rpartition("/")[0] for path, _ in reads} == {"", "model/layers/1/w"}


SOURCE = torch.arange(5 * 6 * 7, dtype=torch.int16).reshape(5, 6, 7)


def indices(length):
    bound = st.none() | st.integers(-length - 2, length + 2)
    step = st.none() | st.integers(-3, 3).filter(bool)
    return st.integers(-length, length - 1) | st.builds(slice, bound, bound, step)


@given(st.data())
def test_indexing_is_numpys(tmp_path_factory, data):
    name = data.draw(st.sampled_from(["x.zarr", "x.zarr.zip", "x.h5"]))
    path = tmp_path_factory.getbasetemp() / f"indexing-{name}"
    if not path.exists():
        dcp_zarr.save({"w": SOURCE}, path, compression=None)
    tensor = dcp_zarr.open_checkpoint(path)["w"]
    parts = [
        data.draw(indices(n)) for n in data.draw(st.sampled_from([(), (5,), (5, 6), (5, 6, 7)]))
    ]
    if data.draw(st.booleans()):
        parts.insert(data.draw(st.integers(0, len(parts))), ...)
        parts = parts if parts.index(...) == len(parts) - 1 else [*parts[: parts.index(...)], ...]
    if data.draw(st.booleans()):
        parts.insert(data.draw(st.integers(0, len(parts))), None)
    index = tuple(parts)
    np.testing.assert_array_equal(tensor.numpy(index), SOURCE.numpy()[index])
    np.testing.assert_array_equal(tensor[index].numpy(), SOURCE.numpy()[index])


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "Index 5 is out of range for an axis of 5 of 'w'"),
        ((0, 0, 0, 0), IndexError, "too many indices or ellipses for tensor 'w' of shape"),
        ([1, 2], OptionError, "takes integers, slices, ... and None, not"),
        (np.array([0, 1]), OptionError, "takes integers, slices, ... and None, not array"),
        ((..., ...), IndexError, "too many indices or ellipses"),
        (True, OptionError, "takes integers, slices, ... and None, not True"),
    ],
)
def test_other_indices_are_refused(index, error, message):
    dcp_zarr.save({"w": SOURCE}, "x.zarr")
    with pytest.raises(error, match=message):
        dcp_zarr.open_checkpoint("x.zarr")["w"][index]


def test_names_that_are_not_there(checkpoint):
    with pytest.raises(
        TensorNotFoundError, match=r"named 'model.layer.0.w'\. Near it: 'model.layers.0.w'"
    ):
        checkpoint["model.layer.0.w"]
    with pytest.raises(KeyError, match=r"'step' in '.*' is an object, not a tensor: use objects"):
        checkpoint["step"]
    with pytest.raises(TensorNotFoundError, match="Nothing in objects of"):
        checkpoint.objects["steps"]
    assert "step" not in checkpoint
    assert "model.layers.0.w" in checkpoint


def test_the_tree_shows_names_shapes_and_values(checkpoint):
    assert str(checkpoint.tree()).splitlines()[1:] == [
        "├── model  2 tensors · 26 elements · 104 B",
        "│   └── layers  2 tensors · 26 elements · 104 B",
        "│       ├── 0  1 tensor · 24 elements · 96 B",
        "│       │   └── w  float32 [4, 6] · 96 B",
        "│       └── 1  1 tensor · 2 elements · 8 B",
        "│           └── w  float32 [2] · 8 B",
        "├── step  7",
        "└── betas  object, 1.2 KiB",
    ]
    assert repr(checkpoint).startswith("Checkpoint ")
    assert "2 tensors, 26 elements, 104 B" in repr(checkpoint)


def test_a_long_tree_is_cut_in_the_repr_and_whole_in_tree():
    dcp_zarr.save({f"w{n:03}": torch.zeros(1) for n in range(100)}, "x.zarr", sync_files=False)
    checkpoint = dcp_zarr.open_checkpoint("x.zarr")
    assert repr(checkpoint).endswith("… 77 more lines: tree() shows all")
    assert len(str(checkpoint.tree()).splitlines()) == 101


def test_a_deep_tree_is_folded_in_the_repr_so_that_its_top_is_seen():
    state = {"model": {f"l{n}": {"w": torch.zeros(1), "b": torch.zeros(1)} for n in range(10)}}
    dcp_zarr.save({**state, "step": 1}, "x.zarr", sync_files=False)
    lines = repr(dcp_zarr.open_checkpoint("x.zarr")).splitlines()
    assert len(lines) == 13
    assert lines[2] == "│   ├── l0  2 tensors · 2 elements · 8 B"
    assert lines[-1] == "└── step  1"


def test_the_path_is_shown_as_it_was_given(path):
    dcp_zarr.save({"w": torch.zeros(1)}, path)
    assert repr(dcp_zarr.open_checkpoint(path)).startswith(f"Checkpoint {path}: 1 tensor")


def test_a_group_of_tensors_is_pointed_at(checkpoint, path):
    message = f"'model.layers' in {path!r} is no entry, but holds 2, such as 'model.layers.0.w'"
    with pytest.raises(TensorNotFoundError, match=message):
        checkpoint["model.layers"]
    with pytest.raises(TensorNotFoundError, match="Near it: 'model'"):
        dcp_zarr.load(path, "modle")


def test_a_group_of_objects_is_pointed_at():
    dcp_zarr.save({"config": {"layers": 12}}, "x.zarr")
    with pytest.raises(
        TensorNotFoundError, match="'config' in .* holds 1, such as 'config.layers'"
    ):
        dcp_zarr.open_checkpoint("x.zarr")["config"]


def test_names_are_escaped_in_html():
    dcp_zarr.save({"<script>alert(1)</script>": torch.zeros(1), "o": "<b>"}, "x.zarr")
    html = dcp_zarr.open_checkpoint("x.zarr")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<b>'" not in html.replace("<b>Checkpoint", "")


def test_keys_are_completed(checkpoint):
    assert checkpoint._ipython_key_completions_() == list(checkpoint)


def test_objects_come_as_they_were_saved(checkpoint):
    assert dict(checkpoint.objects) == {"step": 7, "betas": (0.9, 0.95)}
    assert repr(checkpoint.objects) == "step: 7\nbetas: object, 1.2 KiB"


def test_numpy_views_have_the_dtypes_of_ml_dtypes(path):
    dcp_zarr.save({"w": torch.tensor([1.5, -0.0]).bfloat16()}, path)
    tensor = dcp_zarr.open_checkpoint(path)["w"]
    assert np.asarray(tensor).dtype == tensor.dtype == "bfloat16"
    assert np.asarray(tensor, dtype="float32").tolist() == [1.5, -0.0]
    with pytest.raises(ValueError, match="cannot be seen without a copy"):
        np.array(tensor, copy=False)


def test_a_checkpoint_is_closed_by_its_context(path):
    dcp_zarr.save({"w": torch.ones(1)}, path)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        tensor = checkpoint["w"]
    with pytest.raises(dcp_zarr.DcpZarrError, match="was closed"):
        tensor[...]


def test_many_threads_may_read_one_checkpoint(path):
    source = torch.randn(300, 400)
    dcp_zarr.save({"w": source}, path)
    tensor = dcp_zarr.open_checkpoint(path)["w"]
    failures = []

    def work(start):
        for row in range(start, 300, 8):
            if not torch.equal(tensor[row], source[row]):
                failures.append(row)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_looking_needs_no_torch_and_no_zarr(checkpoint, tmp_path, path):
    program = """
        import sys
        sys.modules["torch"] = sys.modules["zarr"] = None
        import numpy as np, dcp_zarr
        with dcp_zarr.open_checkpoint(sys.argv[1]) as checkpoint:
            print(checkpoint.tree(), repr(checkpoint), checkpoint._repr_html_())
            print(checkpoint.objects["step"], list(checkpoint), checkpoint["model.layers.0.w"])
            assert np.asarray(checkpoint["model.layers.0.w"])[1, 2] == 8
            assert checkpoint["model.layers.0.w"].numpy(np.s_[1:3, ::2]).shape == (2, 3)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), path], check=True, stdout=-3, cwd=tmp_path
    )


def test_importing_the_package_imports_no_torch():
    program = "import dcp_zarr, sys; assert 'torch' not in sys.modules; dcp_zarr.open_checkpoint"
    subprocess.run([sys.executable, "-c", program], check=True)
