"""The stored form of one read chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Region, Shape

    Values = Callable[[Region], NDArray[Any]]


def encode(
    array: ArrayLayout, codec: Codec, values: Values, read_chunk: Shape
) -> Sequence[bytes | memoryview]:
    """Return the encoded bytes of a read chunk and their crc32c.

    What overhangs the tensor is filled with zeros.

    Parameters
    ----------
    array
        The array.
    codec
        How its read chunks are compressed.
    values
        Gives the bits in a region of the tensor.
    read_chunk
        Grid coordinates.
    """
    box = array.read_grid.box(read_chunk)
    found = values(box)
    if box.sizes != array.read_chunk_shape:
        padded = np.zeros(array.read_chunk_shape, found.dtype)
        padded[tuple(slice(0, n) for n in box.sizes)] = found
        found = padded
    found = np.ascontiguousarray(found)
    compressor = codec.compressor()
    stored = flat(found) if compressor is None else compressor.encode(found)
    return [stored, checksum(stored)]


def flat(values: NDArray[Any]) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return values.reshape(-1).view("u1").data
