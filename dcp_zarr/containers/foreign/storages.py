"""The storages in files that ``torch.save`` wrote without their bytes, which are filled in later.

torch writes such files where it is told to skip data (`torch.serialization.skip_data`). It leaves
the crc32 of each storage at 0, here and in the central directory: both are set when the bytes are
there. Layout of a zip file: APPNOTE.TXT 6.3.10 of PKWARE, sections 4.3.9 and 4.3.12.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from dcp_zarr.containers.foreign.torch_files import Section
from dcp_zarr.containers.zip_format import LOCAL_HEADER_BYTES, content_start, crc32
from dcp_zarr.errors import FormatError

_CENTRAL_BYTES, _CENTRAL_CRC, _CENTRAL_LENGTHS = 46, 16, 28
"""A header in the central directory: its size without names, and where in it are what we need."""
_DESCRIPTOR, _DESCRIPTOR_FOLLOWS = b"PK\7\x08", 8
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """A storage in a file, which may be part of a larger one."""

    start: int
    """Its first byte."""
    nbytes: int
    """Its size."""
    crc_places: tuple[int, ...]
    """Where its crc32 stands."""

    def set_crc(self, fd: int) -> None:
        """Set its crc32 to that of the bytes that are there now."""
        ends = range(self.start, self.start + self.nbytes, _READ_BYTES)
        last = self.start + self.nbytes
        crc = crc32(os.pread(fd, min(_READ_BYTES, last - at), at) for at in ends)
        for place in self.crc_places:
            os.pwritev(fd, [struct.pack("<I", crc)], place)


def find_storages(fd: int, start: int, nbytes: int) -> Iterator[StorageRecord]:
    """Yield the storages, in order, of what torch wrote into a part of a file.

    Parameters
    ----------
    fd
        The file.
    start, nbytes
        The part.

    Raises
    ------
    FormatError
        If torch wrote it in a way that is not known.
    """
    with zipfile.ZipFile(Section(fd, start, nbytes)) as whole:
        directory = start + whole.start_dir
        for entry in whole.infolist():
            header = os.pread(fd, _CENTRAL_BYTES, directory)
            if entry.filename.split("/", 1)[-1].startswith("data/") and entry.file_size:
                yield _record(fd, start, entry, directory)
            directory += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", header, _CENTRAL_LENGTHS))


def _record(fd: int, start: int, entry: zipfile.ZipInfo, directory: int) -> StorageRecord:
    local = start + entry.header_offset
    first = content_start(os.pread(fd, LOCAL_HEADER_BYTES, local), local)
    descriptor = first + entry.file_size
    follows = entry.flag_bits & _DESCRIPTOR_FOLLOWS
    if not follows or os.pread(fd, len(_DESCRIPTOR), descriptor) != _DESCRIPTOR:
        raise FormatError("torch wrote a storage in a way that dcp_zarr does not know.")
    places = directory + _CENTRAL_CRC, descriptor + len(_DESCRIPTOR)
    return StorageRecord(first, entry.file_size, places)
