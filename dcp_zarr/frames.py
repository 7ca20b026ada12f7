"""Compressed read chunks from anybody: decoded into as many bytes as wanted, or refused.

No decoder is believed to look after the memory itself.
"""

from __future__ import annotations

import struct

from isal import isal_zlib

from dcp_zarr.errors import CorruptionError

_BLOSC_HEADER = struct.Struct("<4xI4xI")
"""Of Blosc 1: among others, how many bytes a frame holds, and how many it has."""
_GZIP = 31
"""The way of ISA-L, and of zlib, to say gzip."""


def check_nbytes(found: int, expected: int) -> None:
    """Raise where a read chunk decodes to another size.

    Raises
    ------
    CorruptionError
        With both.
    """
    if found != expected:
        raise CorruptionError(f"A read chunk decodes to {found} bytes, expected {expected}.")


def check_blosc(stored: memoryview, nbytes: int) -> None:
    """Raise unless a frame is as long as its header says, and holds `nbytes` bytes.

    c-blosc believes the header, and would read beyond the frame.

    Raises
    ------
    CorruptionError
        With what was found.
    """
    if len(stored) < _BLOSC_HEADER.size:
        raise CorruptionError(f"A read chunk is cut off after {len(stored)} bytes.")
    held, frame_nbytes = _BLOSC_HEADER.unpack_from(stored)
    check_nbytes(held, nbytes)
    if frame_nbytes != len(stored):
        raise CorruptionError(f"A frame of {frame_nbytes} bytes is stored in {len(stored)}.")


def gzip_decoded(stored: memoryview, nbytes: int) -> bytes:
    """Return the `nbytes` bytes that gzip stored, and never make more.

    Raises
    ------
    CorruptionError
        If it is more or fewer.
    """
    inflate = isal_zlib.decompressobj(wbits=_GZIP)
    decoded: bytes = inflate.decompress(stored, max_length=nbytes + 1)
    check_nbytes(len(decoded), nbytes)
    if not inflate.eof:
        raise CorruptionError("A read chunk ends in the middle.")
    return decoded


def zstd_decoded(stored: memoryview, nbytes: int) -> bytes:
    """Return the `nbytes` bytes that Zstandard stored, and never make more.

    Raises
    ------
    CorruptionError
        If it is more or fewer, or no frame.
    """
    import zstandard  # noqa: PLC0415  what only looks needs none

    try:
        told = zstandard.frame_content_size(stored)
        check_nbytes(told if told >= 0 else nbytes, nbytes)
        decoded = zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"A read chunk cannot be decoded: {error}.") from error
    check_nbytes(len(decoded), nbytes)
    return decoded
