"""The norm of each tensor of a checkpoint, with xarray; no model, no torch.

python examples/norms_xarray.py step-1000.zarr model
"""

from __future__ import annotations

import sys

import numpy as np
import xarray as xr

import dcp_zarr


def norms(path: str, pattern: str = "") -> dict[str, float]:
    """Return the norm of each floating-point tensor, by its name; one at a time is in memory."""
    tree = dcp_zarr.open_checkpoint(path).select(pattern).to_xarray()
    return {
        variable.attrs["fqn"]: norm(variable)
        for node in tree.subtree
        for variable in node.data_vars.values()
        if np.issubdtype(variable.dtype, np.floating)
    }


def norm(variable: xr.DataArray) -> float:
    """Return the square root of the sum of squares, summed in float64."""
    return float(np.sqrt((variable.astype("float64") ** 2).sum()))


if __name__ == "__main__":
    for name, value in norms(*sys.argv[1:]).items():
        print(f"{value:12.6g}  {name}")
