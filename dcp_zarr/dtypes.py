"""What each torch dtype is called, and how it lies in a container.

torch is not imported: its dtypes are known by name. Values move as unsigned bits of the same
size, so NaN payloads and -0.0 survive. Names of the small floats are those that TensorStore and
ml_dtypes use (zarr-extensions registers all but ``float8_e4m3fn``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dcp_zarr.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

JsonScalar = bool | int | float | str | list[float]


@dataclass(frozen=True, slots=True)
class DType:
    """One torch dtype and its stored form."""

    torch_name: str
    """Name in torch, without ``torch.``."""
    data_type: str
    """Zarr v3 ``data_type``."""
    itemsize: int
    """Bytes of one tensor element."""
    fill_value: JsonScalar
    """Zarr ``fill_value``; never read, since every read chunk is written."""
    stored: np.dtype[Any]
    """numpy (or ml_dtypes) dtype of the array's values."""
    trailing: tuple[int, ...] = ()
    """Axes that the array has beyond the tensor's: complex32 is pairs of float16."""

    @property
    def bits(self) -> np.dtype[Any]:
        """Dtype as which the tensor's elements move: unsigned, or complex where 16 bytes."""
        return bits_dtype(self.itemsize)

    def values(self, bits: NDArray[Any]) -> NDArray[Any]:
        """View an array of bits as values; complex32 gains its last axis of 2."""
        if self.trailing:
            return np.ascontiguousarray(bits).view(self.stored).reshape(bits.shape + self.trailing)
        return bits.view(self.stored)


def bits_dtype(itemsize: int) -> np.dtype[Any]:
    """Return the dtype in which elements of `itemsize` bytes are moved without conversion."""
    return np.dtype(f"u{itemsize}") if itemsize <= np.dtype("u8").itemsize else np.dtype("c16")


def _native(torch_name: str, data_type: str, fill_value: JsonScalar) -> DType:
    stored = np.dtype(data_type)
    return DType(torch_name, data_type, stored.itemsize, fill_value, stored)


def _small_float(name: str, fill_value: str) -> DType:
    stored = np.dtype(getattr(ml_dtypes, name))
    return DType(name, name, stored.itemsize, fill_value, stored)


def _packed(torch_name: str) -> DType:
    return DType(torch_name, "uint8", 1, 0, np.dtype("u1"))


_INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
_FLOAT8 = ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
PACKED = ("float4_e2m1fn_x2",)
"""torch dtypes whose elements hold several values; stored as their bytes."""

TABLE: dict[str, DType] = {
    dtype.torch_name: dtype
    for dtype in (
        _native("bool", "bool", False),  # noqa: FBT003
        *(_native(name, name, 0) for name in _INTEGERS),
        *(_native(name, name, 0.0) for name in ("float16", "float32", "float64")),
        *(_native(name, name, [0.0, 0.0]) for name in ("complex64", "complex128")),
        DType("complex32", "float16", 4, 0.0, np.dtype("f2"), trailing=(2,)),
        _small_float("bfloat16", "0x0000"),
        *(_small_float(f"float8_{kind}", "0x00") for kind in _FLOAT8),
        *map(_packed, PACKED),
    )
}
"""Every dtype that can be stored, by its torch name."""

EXTENSION_TYPES = frozenset(
    name for name, dtype in TABLE.items() if isinstance(dtype.fill_value, str)
)
"""Zarr data types that stock zarr-python does not know."""


def dtype_of(torch_name: str, *, encoding: str = "native", fqn: str | None = None) -> DType:
    """Return how a torch dtype is stored.

    Parameters
    ----------
    torch_name
        Name without ``torch.``, such as ``"bfloat16"``.
    encoding
        ``"native"``, or ``"bits"`` to store what stock zarr does not know as unsigned integers.
    fqn
        Named in the error.

    Raises
    ------
    UnsupportedTensorError
        If the dtype has no stored form (the quantised ones).

    Examples
    --------
    >>> dtype_of("bfloat16").data_type, dtype_of("bfloat16", encoding="bits").data_type
    ('bfloat16', 'uint16')
    """
    dtype = TABLE.get(torch_name)
    if dtype is None:
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} has dtype torch.{torch_name}, which dcp_zarr cannot store; "
            "convert it (dequantize() for quantised tensors) or drop it from the state dict.",
            fqn=fqn,
        )
    if encoding == "bits" and torch_name in EXTENSION_TYPES:
        stored = dtype.bits
        return DType(torch_name, stored.name, dtype.itemsize, 0, stored)
    return dtype
