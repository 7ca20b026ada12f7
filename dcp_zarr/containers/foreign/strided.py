"""A tensor, or a region of one, as it lies in a file: bytes and strides."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.errors import CorruptionError
from dcp_zarr.local_files import read_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.region import Region, Shape

_MAX_NUMBER = 2**62
"""Bound of an offset and of a size, so that their sum is a number of 64 bits."""
_MAX_FILE_NAME = 255
_MAX_AXES = 63
"""Bound of numpy, less the axis that complex32 gains."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A box of elements in a file."""

    path: str
    """The file."""
    start: int
    """Byte at which its first element begins."""
    itemsize: int
    """Bytes of an element."""
    shape: Shape
    """Its shape."""
    strides: Shape
    """Elements from one to the next on each axis; none is negative."""

    @classmethod
    def contiguous(cls, path: str, start: int, itemsize: int, shape: Shape) -> Strided:
        """Return the box whose elements lie in C order, without gaps."""
        return cls(path, start, itemsize, shape, c_strides(shape))

    def itself(self) -> Strided:
        """Return it, where what gives a place is asked for."""
        return self

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in C order, without gaps."""
        of_both = zip(self.shape, self.strides, c_strides(self.shape), strict=True)
        return not prod(self.shape) or all(n == 1 or s == c for n, s, c in of_both)

    @property
    def span(self) -> int:
        """Bytes from its first element to the end of its last."""
        if not prod(self.shape):
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def part(self, region: Region) -> Strided:
        """Return a region of it."""
        first = sum(o * s for o, s in zip(region.offsets, self.strides, strict=True))
        return replace(self, start=self.start + first * self.itemsize, shape=region.sizes)

    def read(self, fd: int, out: NDArray[Any]) -> None:
        """Read it all into an array of its shape, of any strides.

        Raises
        ------
        CorruptionError
            If the file ends before.
        """
        if not out.size:
            return
        if not self.is_contiguous:
            self._read_mapped(fd, out)
            return
        values = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        got = read_all(fd, self.start, [values.reshape(-1).view("u1").data])
        if got < self.span:
            raise self._ends()
        if values is not out:
            out[...] = values

    def _read_mapped(self, fd: int, out: NDArray[Any]) -> None:
        """Copy through a mapping of the file: no more is in memory than is asked for."""
        skipped = self.start % mmap.ALLOCATIONGRANULARITY
        first = self.start - skipped
        try:
            mapped = mmap.mmap(fd, skipped + self.span, access=mmap.ACCESS_READ, offset=first)
        except ValueError as error:
            raise self._ends() from error
        with mapped:
            values: NDArray[Any] = np.ndarray(
                self.shape,
                out.dtype,
                mapped,
                skipped,
                tuple(stride * self.itemsize for stride in self.strides),
            )
            out[...] = values
            del values  # so that the mapping can be closed

    def _ends(self) -> CorruptionError:
        return CorruptionError(f"{self.path!r} ends before byte {self.start + self.span}.")


def is_file_name(name: Any) -> bool:  # noqa: ANN401
    """Say whether what is told is the name of a file in the directory in which it is told."""
    is_text = isinstance(name, str) and len(name) <= _MAX_FILE_NAME and name.isprintable()
    return is_text and Path(name).name == name


def numbers_of_axes(told: Any) -> Shape:  # noqa: ANN401
    """Return a shape, or offsets or strides, that a file tells.

    Raises
    ------
    TypeError, ValueError
        If it is none.
    """
    if len(told) > _MAX_AXES or any(type(n) is not int or not 0 <= n < _MAX_NUMBER for n in told):
        raise ValueError("no valid shape and place")
    return tuple(told)


def c_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of an array in C order without gaps."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
