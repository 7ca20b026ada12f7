"""A checkpoint as xarray sees it: a tree of variables that are read when indexed. Needs no torch.

The tree is that which ``xarray.open_datatree`` shows of the Zarr store: what is learnt on one works
on the other, and nested names stay apart. It is a tree for flat names too: one type comes back,
and ``tree.to_dataset()`` is a step away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import names, zarr_format
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import OptionError

try:
    import xarray as xr
    from xarray.core import indexing
except ImportError as error:
    raise OptionError("to_xarray needs xarray, which is not here: pip install xarray.") from error

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from dcp_zarr.lazy_tensor import LazyTensor
    from dcp_zarr.schema import ObjectEntry, Schema


def data_tree(
    tensors: Mapping[str, LazyTensor],
    objects: Mapping[str, ObjectEntry],
    schema: Schema,
    dtype: DTypeLike | None,
) -> xr.DataTree:
    """Return tensors as a tree of lazy variables, at their paths in the store.

    Parameters
    ----------
    tensors
        Tensors by FQN.
    objects
        Objects by FQN; those of JSON become attributes of the root.
    schema
        All of the checkpoint: a name has its path among all names.
    dtype
        Floating-point dtype of numpy to which floating-point values are cast; None for none.

    Raises
    ------
    OptionError
        If `dtype` is no such dtype.
    """
    cast = None if dtype is None else _checked(dtype)
    paths = names.assign_paths(entry.fqn for entry in schema.entries)
    nodes: dict[str, dict[str, xr.Variable]] = {"": {}}
    for fqn, tensor in tensors.items():
        node, _, name = paths[fqn].rpartition("/")
        nodes.setdefault(node, {})[name] = _variable(_Values(tensor, cast), name)
    attributes = {fqn: entry.json[0] for fqn, entry in objects.items() if entry.json}
    datasets = {f"/{node}": xr.Dataset(variables) for node, variables in nodes.items()}
    datasets["/"] = datasets["/"].assign_attrs(attributes)
    return xr.DataTree.from_dict(datasets)


def _checked(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind != "f":
        raise OptionError(
            f"dtype={dtype!r} is no floating-point dtype of numpy: take 'float32', 'float64' or "
            "'float16', or None for values as they are stored."
        )
    return found


def _variable(values: _Values, name: str) -> xr.Variable:
    tensor = values.tensor
    # A variable of the name of its axis would be read at once, as coordinates.
    axes = [
        f"{axis}_" if axis == name else axis for axis in zarr_format.dimension_names(values.shape)
    ]
    attributes = {"fqn": tensor.fqn, "torch_dtype": tensor.torch_dtype}
    return xr.Variable(axes, indexing.LazilyIndexedArray(values), attributes)


class _Values(xr.backends.BackendArray):
    """The values of a tensor, as xarray reads them: from any thread, and after pickling."""

    def __init__(self, tensor: LazyTensor, cast: np.dtype[Any] | None) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self._cast = cast
        self.dtype = self._numbers(np.zeros((1, 2), tensor.dtype)).dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:  # noqa: ANN401
        """Read what an index selects."""
        support = indexing.IndexingSupport.BASIC
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, index: tuple[int | slice, ...]) -> NDArray[Any]:
        return self._numbers(self.tensor.numpy(index))

    @np.errstate(over="ignore", invalid="ignore")
    def _numbers(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return stored values as numbers: what was saved as its bits, or as pairs, included."""
        if self.tensor.torch_dtype == "complex32":  # numpy has none
            return values.astype(np.float32).view(np.complex64)[..., 0]
        values = values.view(dtype_of(self.tensor.torch_dtype).stored)
        is_float = values.dtype.kind in "fV"  # V: those of ml_dtypes
        return values.astype(self._cast, copy=False) if is_float and self._cast else values
