"""What is shown of an entry, and numbers for people. Knows no tensors and no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_zarr.region import Shape

_UNIT = 1024
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Row:
    """What is shown of one entry."""

    fqn: str
    """Fully qualified name."""
    dtype: str
    """Dtype of a tensor; empty for an object."""
    shape: Shape
    """Shape of a tensor."""
    nbytes: int
    """Uncompressed bytes."""
    stored_nbytes: int
    """Bytes as stored."""
    value: str = ""
    """Text of an object's value."""
    codec: str = ""
    """How a tensor is compressed."""

    def summary(self) -> str:
        """Describe the entry in a line, without its name."""
        if not self.dtype:
            return self.value
        return f"{self.dtype} {list(self.shape)} · {size(self.nbytes)}"


def printable(segment: str) -> str:
    """Return a name as it is, or quoted where it would not show."""
    return segment if segment.isprintable() and segment else repr(segment)


def number_in(segment: str) -> int | None:
    """Return the number that a segment of a name is, as those of layers are; None if it is none.

    Examples
    --------
    >>> number_in("12"), number_in("012"), number_in("w1")
    (12, None, None)
    """
    if not (segment.isascii() and segment.isdecimal()) or len(segment) > _MAX_DIGITS:
        return None
    return int(segment) if str(int(segment)) == segment else None


def size(nbytes: float) -> str:
    """Write a number of bytes for people.

    Examples
    --------
    >>> size(0), size(1536), size(3 << 30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _UNIT:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _UNIT
    return f"{nbytes:.1f} TiB"


def rate(nbytes: int, stored_nbytes: int, seconds: float) -> str:
    """Write for people how many bytes were moved in how long.

    Examples
    --------
    >>> rate(3 << 30, 3 << 29, 2.0)
    '3.0 GiB in 2.00 s (1.5 GiB/s), stored in 1.5 GiB (50.0 %)'
    """
    speed, part = size(nbytes / max(seconds, 1e-9)), 100 * stored_nbytes / max(nbytes, 1)
    moved = f"{size(nbytes)} in {seconds:.2f} s ({speed}/s)"
    return f"{moved}, stored in {size(stored_nbytes)} ({part:.1f} %)"


def count(number: float) -> str:
    """Write a count for people.

    Examples
    --------
    >>> count(12), count(124_000_000)
    ('12', '124.0 M')
    """
    for unit in ("", " K", " M", " G"):
        if number < 1000:  # noqa: PLR2004
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"
