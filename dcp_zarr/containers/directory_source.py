"""Loading from a Zarr v3 directory store on a local or shared file system.

Names are looked up relative to the directory that was opened, so that a load stays with one
checkpoint whatever is renamed meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_zarr import zarr_format
from dcp_zarr.commit import LocalCommit
from dcp_zarr.containers.local_source import incomplete
from dcp_zarr.containers.zarr_source import FileRange, ZarrSource
from dcp_zarr.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    DcpZarrError,
    FormatError,
)

_OPEN_TRIES = 5
_SUFFIXES = (".zarr", ".zarr.zip", ".h5", ".hdf5", ".pt", ".pth", ".bin", ".ckpt")
"""Of what may be a checkpoint."""


class DirectorySource(ZarrSource):
    """A committed Zarr directory.

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
        document = self._open_root(commit)
        try:
            self._schema = zarr_format.read_root(document, where=self._where)
        except BaseException:
            self.close()
            raise

    def _open_root(self, commit: LocalCommit) -> bytes:
        """Open the directory, and read its root document; again where it was just replaced."""
        for _ in range(_OPEN_TRIES):
            self._fd = _open_directory(commit)
            try:
                return self._read_root(commit)
            except DcpZarrError:
                replaced = self._is_replaced()
                self.close()
                if not replaced:
                    raise
        raise CorruptionError(f"{self._where!r} is replaced all the time.", path=self._where)

    def _read_root(self, commit: LocalCommit) -> bytes:
        try:
            return self._read(zarr_format.DOCUMENT)
        except FileNotFoundError as error:
            if commit.partial.exists():
                raise incomplete(commit) from error
            raise CheckpointNotFoundError(
                f"There is no checkpoint at {self._where!r}: it has no zarr.json, no .metadata of "
                f"torch and no safetensors.{self._within()}",
                path=self._where,
            ) from error

    def _within(self) -> str:
        """Return a hint at a checkpoint in the directory, or nothing."""
        names = sorted(name for name in os.listdir(self._fd) if name.endswith(_SUFFIXES))
        return (
            f" Open one in it, such as {os.path.join(self._where, names[-1])!r}." if names else ""
        )

    def _read(self, key: str) -> bytes:
        with os.fdopen(self._open_file(key), "rb") as file:
            return file.read()

    @contextmanager
    def _open(self, key: str) -> Iterator[FileRange]:
        fd = self._open_file(key)
        try:
            yield FileRange(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _open_file(self, key: str) -> int:
        # A pipe would have this wait for a writer, and a device has no end.
        fd = os.open(key, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._opened())
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptionError(f"{key!r} in {self._where!r} is no file.", path=self._where)
        return fd


def _open_directory(commit: LocalCommit) -> int:
    # The last look is for a swap that ended between the first two.
    for path in (commit.path, commit.old, commit.path):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except NotADirectoryError as error:
            raise FormatError(
                f"{str(path)!r} is a file; a Zarr checkpoint is a directory.", path=str(path)
            ) from error
    if commit.partial.exists():
        raise incomplete(commit)
    raise CheckpointNotFoundError(
        f"There is no checkpoint at {str(commit.path)!r}.", path=str(commit.path)
    )
