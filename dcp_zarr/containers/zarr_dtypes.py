"""bfloat16 and the float8 kinds for zarr-python, which knows none of them.

Importing this module registers each name that the installed zarr does not have. Entry points have
zarr import it: ``zarr.data_type`` where zarr loads those (3.4.1 and later), ``zarr.buffer``
before. Elsewhere ``import dcp_zarr.containers.zarr_dtypes`` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import zarr
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

from dcp_zarr.dtypes import EXTENSION_TYPES, TABLE, bits_dtype

if hasattr(zarr.errors, "DataTypeValidationError"):
    DataTypeValidationError = zarr.errors.DataTypeValidationError
else:  # zarr < 3.4
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Buffer", "register"]
# `Buffer` is the target of the ``zarr.buffer`` entry point: zarr's own class, under its own name.


class _SmallFloat(ZDType[Any, Any]):
    """A float of ml_dtypes. Scalars are converted through their bits."""

    _zarr_v3_name: ClassVar[str]
    _scalar: ClassVar[Any]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:  # noqa: ANN401
        """Return this data type for its numpy dtype."""
        if dtype == np.dtype(cls._scalar):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}.")

    def to_native_dtype(self) -> Any:  # noqa: ANN401
        """Return the numpy dtype, in the byte order of this data type."""
        native = np.dtype(self._scalar)
        return native.newbyteorder(">") if getattr(self, "endianness", "") == "big" else native

    @classmethod
    def _from_json_v2(cls, value: Any) -> Self:  # noqa: ANN401
        raise DataTypeValidationError(f"{cls._zarr_v3_name} is a data type of Zarr format 3.")

    @classmethod
    def _from_json_v3(cls, value: Any) -> Self:  # noqa: ANN401
        if value == cls._zarr_v3_name or value == {"name": cls._zarr_v3_name}:
            return cls()
        raise DataTypeValidationError(f"{value!r} is not {cls._zarr_v3_name}.")

    def to_json(self, zarr_format: int) -> Any:  # noqa: ANN401
        """Return the name of this data type."""
        if zarr_format != 3:  # noqa: PLR2004
            raise DataTypeValidationError(f"{self._zarr_v3_name} needs Zarr format 3.")
        return self._zarr_v3_name

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return int(np.dtype(self._scalar).itemsize)

    def _check_scalar(self, value: object) -> bool:
        return isinstance(value, (int, float, np.generic)) or (
            isinstance(value, np.ndarray) and value.shape == ()
        )

    def cast_scalar(self, value: object) -> Any:  # noqa: ANN401
        """Return a scalar of this data type."""
        if self._check_scalar(value):
            return self._scalar(value)
        raise TypeError(f"{value!r} is no scalar of {self._zarr_v3_name}.")

    def default_scalar(self) -> Any:  # noqa: ANN401
        """Return the scalar whose bits are zero."""
        return self._from_bits(0)

    def _from_bits(self, bits: int) -> Any:  # noqa: ANN401
        return np.array(bits, bits_dtype(self.item_size)).view(self._scalar)[()]

    def to_json_scalar(self, value: object, *, zarr_format: int) -> str:
        """Return the bits of a scalar in hex, which every reader understands."""
        bits = np.asarray(self.cast_scalar(value)).view(bits_dtype(self.item_size))[()]
        return f"0x{int(bits):0{2 * self.item_size}x}"

    def from_json_scalar(self, value: object, *, zarr_format: int) -> Any:  # noqa: ANN401
        """Read a fill value: bits in hex, a number, or the name of a special value."""
        if isinstance(value, str) and value.startswith("0x"):
            return self._from_bits(int(value, 16))
        if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
            return self._scalar(float(value))
        raise TypeError(f"{value!r} is no fill value of {self._zarr_v3_name}.")


def register() -> None:
    """Make the data types known to zarr, where it does not know them."""
    for name in sorted(EXTENSION_TYPES):
        if name not in data_type_registry.contents:
            data_type_registry.register(name, _data_type(name))
    if "rectilinear_chunks" in zarr.config.get("array", {}):
        zarr.config.set({"array.rectilinear_chunks": True})


def _data_type(name: str) -> type[ZDType[Any, Any]]:
    """Make the class of one data type; only those of several bytes have a byte order."""
    native = TABLE[name].stored
    byte_order = (HasEndianness,) if native.itemsize > 1 else ()
    members: Mapping[str, Any] = {
        "__module__": __name__,
        "_zarr_v3_name": name,
        "_scalar": native.type,
        "dtype_cls": type(native),
    }
    made = type(_class_name(name), (_SmallFloat, *byte_order, HasItemSize), dict(members))
    return dataclass(frozen=True, kw_only=True)(made)


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


register()

CLASSES = {name: data_type_registry.contents[name] for name in EXTENSION_TYPES}


def __getattr__(name: str) -> type[ZDType[Any, Any]]:
    """Give the class of a data type, for zarr's entry points."""
    for data_type, known in CLASSES.items():
        if _class_name(data_type) == name:
            return known
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
