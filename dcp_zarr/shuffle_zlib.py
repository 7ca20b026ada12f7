"""HDF5's filters shuffle and deflate, by ISA-L."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from isal import isal_zlib

from dcp_zarr.errors import CorruptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ShuffleZlib:
    """zlib (RFC 1950) over bytes sorted by their place in the element, as HDF5's filters do it.

    What does not become smaller stays as it is, which its size tells.
    """

    _ISAL_LEVELS = 3

    def __init__(self, level: int, elementsize: int) -> None:
        self._level = level
        self._elementsize = elementsize

    def encode(self, buf: NDArray[Any]) -> bytes | memoryview:
        """Return the stored form of values."""
        values = np.frombuffer(buf, np.uint8)
        by_place = values.reshape(-1, self._elementsize).T
        compress = isal_zlib.compress if self._level <= self._ISAL_LEVELS else zlib.compress
        encoded: bytes = compress(np.ascontiguousarray(by_place).data, self._level)
        return encoded if len(encoded) < len(values) else values.data

    def decode(self, buf: memoryview, out: memoryview) -> None:
        """Decode into bytes of exactly their size.

        Raises
        ------
        CorruptionError
            If `buf` is not what encodes that many bytes.
        """
        if len(buf) == len(out):
            out[:] = buf
            return
        inflate = isal_zlib.decompressobj()
        decoded = inflate.decompress(buf, max_length=len(out) + 1)
        if len(decoded) != len(out):
            raise CorruptionError(
                f"A read chunk decodes to {len(decoded)} bytes, expected {len(out)}."
            )
        if not inflate.eof:
            raise CorruptionError("A read chunk ends in the middle.")
        elements = np.frombuffer(out, np.uint8).reshape(-1, self._elementsize)
        by_place = np.frombuffer(decoded, np.uint8).reshape(self._elementsize, -1)
        for place, octets in enumerate(by_place):  # faster than all places at once
            elements[:, place] = octets
