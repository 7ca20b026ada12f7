"""Stores are read where there is no torch, by a newer zarr on a newer Python."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import xarray

import dcp_zarr

REPOSITORY = Path(__file__).parents[1]
NEWER = sorted(Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python"))


def saved(path, **options):
    state = {
        "model": {"w": torch.arange(600.0).reshape(20, 30).bfloat16(), "b": torch.ones(30)},
        "f8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "step": 7,
    }
    dcp_zarr.save(state, path, **options)
    return state


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Make an environment with zarr >= 3.4 and without torch."""
    if not NEWER:
        pytest.skip("No Python 3.12 or newer is installed by pyenv.")
    folder = tmp_path_factory.mktemp("newer") / "venv"
    subprocess.run([NEWER[-1], "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "zarr>=3.4", "ml_dtypes", "crc32c", "isal"], check=True)
    return folder / "bin/python", [*pip, "--no-deps", REPOSITORY]


def run(python, program, *arguments):
    command = [python, "-W", "error", "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.check_output(command, text=True).splitlines()


LIST = """
    import sys, zarr
    group = zarr.open_group(sys.argv[1], mode="r")
    arrays = [(p, a) for p, a in group.members(max_depth=None) if isinstance(a, zarr.Array)]
    print(sorted((path, str(array.dtype)) for path, array in arrays))
    print(float(group["model/w"][...].astype("float32").sum()))
"""


@pytest.mark.slow
def test_a_newer_zarr_reads_the_store_with_and_without_dcp_zarr(python, tmp_path):
    interpreter, install = python
    total = saved(tmp_path / "x.zarr")["model"]["w"].float().sum().item()
    saved(tmp_path / "bits.zarr", dtype_encoding="bits")
    listed, _ = run(interpreter, LIST, tmp_path / "bits.zarr")
    assert listed == "[('f8', 'uint8'), ('model/b', 'float32'), ('model/w', 'uint16')]"
    subprocess.run(install, check=True)
    listed, found = run(interpreter, LIST, tmp_path / "x.zarr")
    assert listed == "[('f8', 'float8_e4m3fn'), ('model/b', 'float32'), ('model/w', 'bfloat16')]"
    assert float(found) == total
    program = """
        import sys, numpy, dcp_zarr
        checkpoint = dcp_zarr.open_checkpoint(sys.argv[1])
        print(checkpoint.objects["step"], checkpoint.verify())
        print(float(numpy.asarray(checkpoint["model.w"], "float32").sum()), "torch" in sys.modules)
    """
    assert run(interpreter, program, tmp_path / "x.zarr") == ["7 []", f"{total} False"]


def test_xarray_opens_the_store_as_a_tree(tmp_path):
    state = saved(tmp_path / "x.zarr")
    tree = xarray.open_datatree(tmp_path / "x.zarr", engine="zarr", consolidated=False)
    assert tree["model/w"].shape == (20, 30)
    assert tree["model/w"].astype("float32").values.tolist() == state["model"]["w"].tolist()
