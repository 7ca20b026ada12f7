"""Loading from a Zarr v3 store in one zip file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dcp_zarr import zarr_format
from dcp_zarr.commit import LocalCommit
from dcp_zarr.containers.local_source import open_committed
from dcp_zarr.containers.zarr_source import FileRange, ZarrSource
from dcp_zarr.containers.zip_format import (
    LOCAL_HEADER_BYTES,
    Entry,
    content_start,
    crc32,
    same_header,
)
from dcp_zarr.errors import (
    CorruptionError,
    DcpZarrError,
    FormatError,
)

if TYPE_CHECKING:
    from dcp_zarr.schema import Schema


class ZipSource(ZarrSource):
    """A committed zip file.

    Parameters
    ----------
    path
        Path of the checkpoint.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        commit = LocalCommit(path)
        super().__init__(str(commit.path), os.fspath(path))
        self._fd = open_committed(commit, self._where)
        try:
            self._entries = self._directory()
            self._schema = self._read_root()
        except BaseException:
            self.close()
            raise

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        """Read the central directory; whatever `zipfile` makes of a damaged one is one error."""
        try:
            with (
                os.fdopen(os.dup(self._fd), "rb") as file,
                zipfile.ZipFile(file) as whole,
            ):
                return {entry.filename: entry for entry in whole.infolist()}
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OSError) as error:
            raise self._not_a_zip(error) from error

    def _not_a_zip(self, error: Exception) -> DcpZarrError:
        if self._path.endswith(".zip"):
            return CorruptionError(
                f"{self._where!r} is not a whole zip file: {error}. Restore it from a copy.",
                path=self._where,
            )
        return FormatError(
            f"{self._where!r} is a file, but no zip file and no HDF5 file, nor one of torch or "
            "safetensors; give the path of one of these, or of a directory.",
            path=self._where,
        )

    def _read_root(self) -> Schema:
        try:
            return zarr_format.read_root(self._read(zarr_format.DOCUMENT), where=self._where)
        except FileNotFoundError as error:
            raise FormatError(
                f"{self._where!r} is a zip file, but no checkpoint: it has no zarr.json, and "
                "no data.pkl of torch.save in front.",
                path=self._where,
            ) from error

    def _entry(self, key: str) -> zipfile.ZipInfo:
        size = os.fstat(self._opened()).st_size
        try:
            entry = self._entries[key]
        except KeyError as error:
            raise FileNotFoundError(key) from error
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptionError(
                f"{key!r} in {self._where!r} is deflated; pack the store with zip -0 -r.",
                path=self._where,
            )
        if not 0 <= entry.header_offset <= size - entry.file_size:
            raise CorruptionError(f"{key!r} is said to lie outside the file.", path=self._where)
        return entry

    def _read(self, key: str) -> bytes:
        entry = self._entry(key)
        with self._open(key) as at:
            content = os.pread(at.fd, at.nbytes, at.start)
        if len(content) < at.nbytes or crc32([content]) != entry.CRC:
            raise CorruptionError(f"{key!r} is damaged: its crc32 does not hold.")
        return content

    @contextmanager
    def _open(self, key: str) -> Iterator[FileRange]:
        entry = self._entry(key)
        header = os.pread(self._fd, LOCAL_HEADER_BYTES, entry.header_offset)
        try:
            start = content_start(header, entry.header_offset)
        except ValueError as error:
            raise CorruptionError(f"The local header of {key!r} is damaged.") from error
        yield FileRange(self._fd, start, entry.file_size)

    def damaged_documents(self) -> Iterator[str]:
        """Describe each document and each entry that is not the one that was saved."""
        yield from super().damaged_documents()
        for entry in self._entries.values():
            told = Entry(entry.filename, entry.header_offset, entry.file_size, entry.CRC)
            try:
                self._read(entry.filename)
                header = os.pread(self._fd, LOCAL_HEADER_BYTES, entry.header_offset)
                if not same_header(header, told):
                    yield f"The local header of {entry.filename!r} is damaged."
            except CorruptionError as error:
                yield str(error)


def root_document(path: str | os.PathLike[str]) -> bytes:
    """Return the root document of a store in a zip file, whatever it says.

    Raises
    ------
    FormatError, CorruptionError
        If there is none.
    """
    source = object.__new__(ZipSource)
    ZarrSource.__init__(source, os.fspath(path), os.fspath(path))
    source._fd = os.open(path, os.O_RDONLY)
    try:
        source._entries = source._directory()
        return source._read(zarr_format.DOCUMENT)
    finally:
        source.close()
