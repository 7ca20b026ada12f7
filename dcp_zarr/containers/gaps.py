"""Holes that the slabs of a file leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_zarr.errors import SaveError
from dcp_zarr.local_files import read_all, write_all

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_HOLES = 0.08
"""Part of what was placed in a file that the holes between may add."""


def read_placed(fd: int, offset: int, nbytes: int) -> memoryview:
    """Read what a rank placed in a file.

    Raises
    ------
    SaveError
        If the file ends before.
    """
    buffer = memoryview(bytearray(nbytes))
    if read_all(fd, offset, [buffer]) < nbytes:
        raise SaveError(f"What the ranks wrote ends before byte {offset + nbytes}.")
    return buffer


def close_gaps(fd: int, placed: NDArray[np.uint64], start: int = 0) -> NDArray[np.uint64]:
    """Move what was placed together where the holes are many; return where it is.

    Data that compresses far better than expected leaves most of its slabs empty. Such holes take no
    space here, but would in a copy that fills them.

    Parameters
    ----------
    fd
        The file.
    placed
        Offset and size of each part that was placed, in rows; at least one.
    start
        Where the first may lie.
    """
    total = int(placed[:, 1].sum())
    if int(placed.sum(axis=1).max()) - start <= total * (1 + _MAX_HOLES):
        return placed
    moved, end = placed.copy(), start
    for number in placed[:, 0].argsort().tolist():
        offset, nbytes = placed[number].tolist()
        if offset != end:
            write_all(fd, end, [read_placed(fd, offset, nbytes)])
        moved[number, 0] = end
        end += nbytes
    return moved
