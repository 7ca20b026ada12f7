"""A checkpoint as a tree of xarray variables."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
import xarray as xr

import dcp_zarr
from dcp_zarr.errors import CorruptionError, OptionError

VALUES = torch.tensor([[1.5, -0.0], [float("nan"), -2.0]])
SOURCE = torch.arange(5 * 6 * 5, dtype=torch.int16).reshape(5, 6, 5)


def opened(state, path, dtype="float32", **options):
    dcp_zarr.save(state, path, **options)
    return dcp_zarr.open_checkpoint(path).to_xarray(dtype)


def test_the_tree_is_the_one_that_xarray_shows_of_the_store():
    state = {"model": {"0": {"w": VALUES, "b": VALUES[0]}, "1": {"w": SOURCE}}, "scale": VALUES[0]}
    tree = opened({**state, "w": VALUES[0], "w.scale": VALUES[1], "step": 7}, "x.zarr", None)
    stored = xr.open_datatree("x.zarr", engine="zarr", consolidated=False)
    assert {node.path for node in tree.subtree} == {node.path for node in stored.subtree}
    for node in tree.subtree:
        assert set(node.variables) == set(stored[node.path].variables)
        for name, variable in node.variables.items():
            xr.testing.assert_equal(variable, stored[node.path].variables[name])


def test_attributes_say_what_was_saved(path):
    tree = opened({"model": {"a/b": VALUES.bfloat16()}, "step": 7, "betas": (1, 2)}, path)
    (variable,) = tree["model"].data_vars.values()
    assert variable.attrs == {"fqn": "model.a/b", "torch_dtype": "bfloat16"}
    assert tree.attrs == {"step": 7}
    assert variable.dims == ("n2", "n2_2")


def test_a_selection_becomes_a_tree_of_what_it_selects_at_its_place_in_the_store(path):
    dcp_zarr.save({"model": {"w": VALUES}, "other": VALUES, "model.w.scale": VALUES[0]}, path)
    checkpoint = dcp_zarr.open_checkpoint(path)
    assert [node.path for node in checkpoint.select("other").to_xarray().subtree] == ["/"]
    (variable,) = checkpoint.select("m*l.*").select("model.w.scale").to_xarray()["model/w"].values()
    assert variable.name == "scale"
    assert checkpoint.select("model.w").to_xarray()["model/w/~_value"].shape == (2, 2)


@pytest.mark.parametrize("encoding", ["native", "bits"])
@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"],
)
def test_floats_come_right_as_float32_and_as_they_are_stored(name, encoding, path):
    values = VALUES.to(getattr(torch, name))
    tree = opened({"w": values}, path, dtype_encoding=encoding)
    np.testing.assert_array_equal(tree["w"].values, values.float().numpy())
    assert tree["w"].dtype == tree["w"].values.dtype == "float32"
    as_stored = dcp_zarr.open_checkpoint(path).to_xarray(None)["w"]
    assert as_stored.dtype == as_stored.values.dtype == np.dtype(getattr(ml_dtypes, name, name))


def test_powers_of_two_come_right(path):
    values = torch.tensor([1, 127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert opened({"w": values}, path)["w"].values.tolist() == [2.0**-126, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize(
    ("name", "parts"), [("complex32", "half"), ("complex64", "float"), ("complex128", "double")]
)
def test_complex_values_stay_complex(name, parts, dtype, path):
    values = getattr(torch.tensor([[1, 2, 0, -3.5]]), parts)().view(getattr(torch, name))
    array = opened({"w": values}, path, dtype)["w"]
    assert array.dims == ("n1", "n2")
    assert array.dtype == {"complex32": "complex64"}.get(name, name)
    assert array[0, 1].values == -3.5j
    assert array.values.tolist() == [[1 + 2j, -3.5j]]


@pytest.mark.parametrize("values", [torch.tensor([2**40 + 1]), torch.tensor([True, False])])
def test_integers_and_booleans_are_not_cast(values, path):
    assert opened({"w": values}, path)["w"].values.tolist() == values.tolist()


def test_tensors_without_axes_or_elements(path):
    tree = opened({"s": torch.tensor(3.0), "e": torch.ones(0, 4)}, path)
    assert tree["s"].values == 3
    assert tree["e"].sizes == {"n0": 0, "n4": 4}
    assert tree["e"].values.shape == (0, 4)


@pytest.mark.parametrize(
    "index",
    [
        np.s_[2],
        np.s_[..., ::-2],
        np.s_[1:4, -1, 3:0:-1],
        np.s_[np.array([0, 4, 1]), :, np.array([2, 2])],
        np.s_[4, 5, 4],
    ],
)
def test_indexing_is_xarrays(index, path):
    array = opened({"w": SOURCE}, path)["w"]
    expected = xr.DataArray(SOURCE.numpy(), dims=array.dims)
    np.testing.assert_array_equal(array[index].values, expected[index].values)


def test_points_are_selected(path):
    array = opened({"w": SOURCE}, path)["w"]
    picked = array.isel(n5=xr.DataArray([0, 4], dims="p"), n6=xr.DataArray([5, 1], dims="p"))
    np.testing.assert_array_equal(picked.values, SOURCE.numpy()[[0, 4], [5, 1]])


def test_a_variable_of_its_axis_name_is_lazy_too(reads):
    tree = opened({"n2": VALUES}, "x.zarr")
    reads.clear()
    assert tree["n2"].dims == ("n2_", "n2_2")
    assert reads == []


def test_one_slice_reads_the_read_chunks_that_it_touches(reads):
    tensor = torch.arange(4096.0).reshape(64, 64)
    tree = opened({"w": tensor}, "x.zarr", compression=None, read_chunk_bytes=4096)
    reads.clear()
    repr(tree)
    row = tree["w"][17]
    assert reads == []
    assert row.values.tolist() == tensor[17].tolist()
    (read,) = [nbytes for name, nbytes in reads if name == "w/c.0.0" and nbytes > 4000]
    assert read == 4096 + 4


def test_damage_raises():
    tree = opened({"w": torch.ones(5)}, "x.zarr", compression=None)
    with open("x.zarr/w/c.0", "r+b") as file:
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match="Tensor 'w'"):
        tree["w"].values


def test_variables_are_read_after_pickling_and_copying(path):
    tree = opened({"m": {"w": SOURCE}}, path)
    for other in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)):
        np.testing.assert_array_equal(other["m/w"][1].values, SOURCE[1].numpy())


def test_many_threads_read_one_tree(path):
    array = opened({"w": SOURCE}, path)["w"]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda n: array[n % 5].values, range(40)))
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(row, SOURCE[number % 5].numpy())


def test_dask_reads_in_parts(path):
    array = opened({"w": SOURCE}, path)["w"].chunk(n5=2)
    np.testing.assert_array_equal(array.sum("n6").values, SOURCE.numpy().sum(1))


@pytest.mark.parametrize("dtype", ["int8", "flaot32", "complex64", "bfloat16"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(OptionError, match=f"dtype='{dtype}' is no floating-point dtype of numpy"):
        opened({"w": VALUES}, "x.zarr", dtype)


PROGRAM = """
    import sys
    sys.modules[sys.argv[1]] = None
    import dcp_zarr
    print(dcp_zarr.open_checkpoint("x.zarr").to_xarray()["w"].values.sum())
"""


def in_python_without(module):
    program = textwrap.dedent(PROGRAM)
    return subprocess.run(
        [sys.executable, "-c", program, module], capture_output=True, text=True, check=False
    )


def test_torch_is_not_needed():
    dcp_zarr.save({"w": torch.ones(3).bfloat16()}, "x.zarr")
    assert in_python_without("torch").stdout == "3.0\n"


def test_that_xarray_is_missing_is_said():
    dcp_zarr.save({"w": torch.ones(3)}, "x.zarr")
    message = "OptionError: to_xarray needs xarray, which is not here: pip install xarray."
    assert message in in_python_without("xarray").stderr
