"""The parts of a zip file, as bytes; no I/O.

Source: APPNOTE.TXT 6.3.10 of PKWARE, sections 4.3.7 (local header), 4.3.12 (central directory),
4.3.14 to 4.3.16 (its end), 4.5.3 (zip64). Entries are stored, not deflated, and smaller than 4 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal import isal_zlib

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_EXTRA64 = struct.Struct("<HHQ")

_MADE_ON_UNIX = 3 << 8
_STORED, _STORED64 = 10, 45
_DATE = (1 << 5) | 1
"""The first of January 1980, in MS-DOS' way: equal values give equal files."""
_PERMISSIONS = 0o100644 << 16
_MAX16, _MAX32 = 2**16 - 1, 2**32 - 1

LOCAL_HEADER_BYTES = _LOCAL.size
"""Size of a local header without name and extra field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file of a zip file."""

    name: str
    """Its path; ASCII."""
    start: int
    """Where its local header begins."""
    nbytes: int
    """Bytes of its content."""
    crc: int
    """The crc32 (ISO 3309) of its content."""

    @classmethod
    def of(cls, name: str, start: int, content: bytes) -> Entry:
        """Return the entry that some content makes."""
        return cls(name, start, len(content), crc32([content]))

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + LOCAL_HEADER_BYTES + len(self.name) + self.nbytes

    def local_header(self) -> bytes:
        """Return what stands before its content."""
        fixed = b"PK\3\4", _STORED, 0, 0, 0, _DATE, self.crc, self.nbytes, self.nbytes
        return _LOCAL.pack(*fixed, len(self.name), 0) + self.name.encode("ascii")


def crc32(buffers: Iterable[Buffer]) -> int:
    """Return the crc32 of buffers, one after the other."""
    crc = 0
    for buffer in buffers:
        crc = isal_zlib.crc32(buffer, crc)
    return crc


def content_start(local_header: bytes, start: int) -> int:
    """Return where an entry's content begins.

    Parameters
    ----------
    local_header
        The first `LOCAL_HEADER_BYTES` of its local header.
    start
        Where that begins.

    Raises
    ------
    ValueError
        If it is none.
    """
    if len(local_header) < _LOCAL.size or not local_header.startswith(b"PK\3\4"):
        raise ValueError("no local header")
    *_, name_nbytes, extra_nbytes = _LOCAL.unpack(local_header)
    return start + _LOCAL.size + int(name_nbytes) + int(extra_nbytes)


def same_header(local_header: bytes, entry: Entry) -> bool:
    """Say whether an entry's local header tells its checksum and size, or leaves them out."""
    if len(local_header) < _LOCAL.size:
        return False
    _, _, flags, method, _, _, *told, name_nbytes, _ = _LOCAL.unpack(local_header)
    follow_the_content = flags & 8
    expected = [entry.crc, entry.nbytes, entry.nbytes]
    sound = method == 0 and name_nbytes == len(entry.name.encode())
    return sound and (bool(follow_the_content) or told == expected)


def central_directory(entries: Sequence[Entry], start: int) -> bytes:
    """Return the central directory and its end: what makes a zip file of entries.

    Parameters
    ----------
    entries
        All entries; readers list them in this order.
    start
        Where the directory will begin.
    """
    directory = b"".join(map(_central_header, entries))
    count, size = len(entries), len(directory)
    end = _END.pack(
        b"PK\5\6", 0, 0, *[min(count, _MAX16)] * 2, min(size, _MAX32), min(start, _MAX32), 0
    )
    if count < _MAX16 and start + size < _MAX32:
        return directory + end
    made = _MADE_ON_UNIX | _STORED64
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, made, _STORED64, 0, 0, count, count, size, start
    )
    return directory + end64 + _LOCATOR64.pack(b"PK\6\7", 0, start + size, 1) + end


def _central_header(entry: Entry) -> bytes:
    far = entry.start >= _MAX32
    extra = _EXTRA64.pack(1, 8, entry.start) if far else b""
    version = _STORED64 if far else _STORED
    header = _CENTRAL.pack(
        b"PK\1\2",
        _MADE_ON_UNIX | version,
        version,
        0,
        0,
        0,
        _DATE,
        entry.crc,
        entry.nbytes,
        entry.nbytes,
        len(entry.name),
        len(extra),
        0,
        0,
        0,
        _PERMISSIONS,
        min(entry.start, _MAX32),
    )
    return header + entry.name.encode("ascii") + extra
