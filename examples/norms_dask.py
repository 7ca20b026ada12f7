"""The norm of each tensor of a checkpoint, with dask: in parts, and on all cores or machines.

python examples/norms_dask.py step-1000.zarr model
"""

from __future__ import annotations

import sys

import dask
import numpy as np
import xarray as xr

import dcp_zarr

PART_BYTES = 64 << 20
"""What a task reads at once, as float32."""


def norms(path: str, pattern: str = "") -> dict[str, float]:
    """Return the norm of each floating-point tensor, by its name, in one computation."""
    tree = dcp_zarr.open_checkpoint(path).select(pattern).to_xarray()
    lazy = {
        variable.attrs["fqn"]: norm(in_parts(variable))
        for node in tree.subtree
        for variable in node.data_vars.values()
        if np.issubdtype(variable.dtype, np.floating)
    }
    (values,) = dask.compute(lazy)
    return {name: float(value) for name, value in values.items()}


def in_parts(variable: xr.DataArray) -> xr.DataArray:
    """Return the variable over dask: whole rows, and so many that a part has `PART_BYTES`."""
    if not variable.size or not variable.dims:
        return variable.chunk()
    rows = max(PART_BYTES * variable.shape[0] // (variable.size * variable.dtype.itemsize), 1)
    return variable.chunk({variable.dims[0]: rows})


def norm(variable: xr.DataArray) -> xr.DataArray:
    """Return the square root of the sum of squares, summed in float64; nothing is read yet."""
    return np.sqrt((variable.astype("float64") ** 2).sum())


if __name__ == "__main__":
    for name, value in norms(*sys.argv[1:]).items():
        print(f"{value:12.6g}  {name}")
