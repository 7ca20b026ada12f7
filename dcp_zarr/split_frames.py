"""Blosc frames of zstd and byte shuffle that are smaller and faster to make than Blosc's own.

Sorted by their place in the element, the bytes of trained numbers fall into planes: those of sign
and exponent, which have a third of their size, and noise. Blosc compresses the planes of a block
as one stream; here each is a stream of its own. Noise is stored as it is, and exponents go
through zstd with parameters for bytes that have frequencies, but repeat nothing. Any Blosc reads
the frames.

Source: the layout of Blosc 1 frames in ``README_CHUNK_FORMAT.rst`` of c-blosc 1.21, and its
``blosc_d``: a block is split into as many streams as an element has bytes where flag 0x10 is not
set, the last block only if it is whole; a stream of its uncompressed size is not compressed.
"""

from __future__ import annotations

import struct
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.scratch import scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_BYTES = 8 << 10
"""Below this size frames are Blosc's own: each stream has a table of frequencies."""

_HEADER = struct.Struct("<BBBBIII")
_LENGTH = struct.Struct("<i")
_FORMAT, _ZSTD_FORMAT = 2, 1
_SHUFFLED, _COPIED, _ZSTD = 0x01, 0x02, 4 << 5
_BLOCK_BYTES = 1 << 20
_SAMPLE = 8 << 10
"""Elements by which a plane is judged."""
_NOISE_BITS = 7.6
"""Bits a byte from which a plane is noise; 3 % is the most that is lost."""
_WORTH = 0.93
"""What repetitions have to make of a plane to be looked for: it takes three times as long."""


def encode(values: NDArray[Any]) -> memoryview:
    """Return the frame of a C-contiguous array of `MIN_BYTES` or more.

    Elements have 1, 2, 4, 8 or 16 bytes.
    """
    octets, itemsize = values.reshape(-1).view("u1"), values.itemsize
    nbytes, block_nbytes = octets.size, _block_nbytes(octets.size, itemsize)
    ways = _ways(octets, itemsize)
    starts = range(0, nbytes, block_nbytes)
    frame = np.empty(_HEADER.size + nbytes + len(starts) * (4 + 4 * itemsize), np.uint8)
    at, firsts = _HEADER.size + 4 * len(starts), []
    for start in starts:
        firsts.append(at)
        block = octets[start : start + block_nbytes]
        if block.size == block_nbytes:
            for place, way in enumerate(ways):
                at = _put_plane(frame, at, block, itemsize, place, way)
        else:
            planes = np.ascontiguousarray(block.reshape(-1, itemsize).T)
            at = _put(frame, at, planes.reshape(-1), _tuned())
    if at >= _HEADER.size + nbytes:
        return _copied(octets, itemsize)
    struct.pack_into(f"<{len(firsts)}i", frame.data, _HEADER.size, *firsts)
    head = _FORMAT, _ZSTD_FORMAT, _SHUFFLED | _ZSTD, itemsize, nbytes, block_nbytes, at
    _HEADER.pack_into(frame.data, 0, *head)
    return frame[:at].data


def _copied(octets: NDArray[np.uint8], itemsize: int) -> memoryview:
    """Return the frame of bytes that cannot be made smaller."""
    size = octets.size
    head = _FORMAT, _ZSTD_FORMAT, _COPIED | _SHUFFLED | _ZSTD, itemsize, size, size
    frame = np.empty(_HEADER.size + size, np.uint8)
    _HEADER.pack_into(frame.data, 0, *head, frame.size)
    frame[_HEADER.size :] = octets
    return frame.data


def _block_nbytes(nbytes: int, itemsize: int) -> int:
    """Return the size of equal blocks of 1 MiB at most, or else that of all but the last."""
    least = -(-nbytes // _BLOCK_BYTES)
    for count in range(least, 2 * least + 1):
        if nbytes % (count * itemsize) == 0:
            return nbytes // count
    return _BLOCK_BYTES


def _ways(octets: NDArray[np.uint8], itemsize: int) -> list[Any]:
    """Choose for each plane how it is compressed, by a sample of it; None for noise."""
    count = octets.size // itemsize
    first = max(count - _SAMPLE, 0) // 2 * itemsize
    sample = octets[first : first + _SAMPLE * itemsize].reshape(-1, itemsize)
    return [_way(np.ascontiguousarray(sample[:, place])) for place in range(itemsize)]


def _way(plane: NDArray[np.uint8]) -> Any:  # noqa: ANN401
    counts = np.bincount(plane[:: _SAMPLE >> 12])
    counts = counts[counts > 0]
    shares = counts / counts.sum()
    if -(shares @ np.log2(shares)) > _NOISE_BITS:
        return None
    repeats = len(_level_1()(plane)) < _WORTH * len(_tuned()(plane))
    return _level_1() if repeats else _tuned()


def _put_plane(
    frame: NDArray[np.uint8],
    at: int,
    block: NDArray[np.uint8],
    itemsize: int,
    place: int,
    way: Any,  # noqa: ANN401
) -> int:
    """Write one stream of a block; return where the next begins."""
    count = block.size // itemsize
    if way is None:
        _take_plane(block, itemsize, place, frame[at + 4 : at + 4 + count])
        _LENGTH.pack_into(frame.data, at, count)
        return at + 4 + count
    plane = block
    if itemsize > 1:
        plane = np.frombuffer(scratch("plane", count), np.uint8)
        _take_plane(block, itemsize, place, plane)
    return _put(frame, at, plane, way)


def _put(frame: NDArray[np.uint8], at: int, plane: NDArray[np.uint8], way: Any) -> int:  # noqa: ANN401
    """Write a stream, compressed where that makes it smaller; return where the next begins."""
    stream: Any = way(plane.data)
    if len(stream) >= plane.size:
        stream = plane
    frame[at + 4 : at + 4 + len(stream)] = np.frombuffer(stream, np.uint8)
    _LENGTH.pack_into(frame.data, at, len(stream))
    return at + 4 + len(stream)


def _take_plane(
    block: NDArray[np.uint8], itemsize: int, place: int, out: NDArray[np.uint8]
) -> None:
    """Copy one byte of each element; shifts are several times faster than strides."""
    if itemsize not in (2, 4, 8):
        out[...] = block.reshape(-1, itemsize)[:, place]
        return
    words = block.view(f"<u{itemsize}")
    if place:
        shifted = np.frombuffer(scratch("words", block.size), words.dtype)
        words = np.right_shift(words, 8 * place, out=shifted)
    np.copyto(out, words, casting="unsafe")


_local = threading.local()


def _compress(name: str) -> Any:  # noqa: ANN401
    """Return this thread's compressor of that name: one is for one thread at a time."""
    if not hasattr(_local, name):
        import zstandard  # noqa: PLC0415  what only looks needs none

        setattr(_local, name, zstandard.ZstdCompressor(**_parameters(name)).compress)
    return getattr(_local, name)


@cache
def _parameters(name: str) -> dict[str, Any]:
    import zstandard  # noqa: PLC0415

    if name == "level_1":
        return {"level": 1}
    return {
        "compression_params": zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=19,
            chain_log=6,
            hash_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
        )
    }


def _tuned() -> Any:  # noqa: ANN401
    return _compress("tuned")


def _level_1() -> Any:  # noqa: ANN401
    return _compress("level_1")
