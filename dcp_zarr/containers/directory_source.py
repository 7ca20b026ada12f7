"""Loading from a Zarr v3 directory store on a local or shared file system.

Names are looked up relative to the directory that was opened, so that a load stays with one
checkpoint whatever is renamed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_zarr import names, zarr_format
from dcp_zarr.commit import LocalCommit
from dcp_zarr.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    DcpZarrError,
    FormatError,
    IncompleteCheckpointError,
)
from dcp_zarr.local_files import read_all

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema


_OPEN_TRIES = 5


class DirectorySource:
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
        self._path = str(commit.path)
        self._where = os.fspath(path)
        self._checked: set[str] = set()
        document = self._open_root(commit)
        try:
            self._schema = zarr_format.read_root(document, where=self._where)
        except BaseException:
            self.close()
            raise

    def _open_root(self, commit: LocalCommit) -> bytes:
        """Open the directory, and read its root document; again where it was just replaced."""
        for _ in range(_OPEN_TRIES):
            self._root = _open_directory(commit)
            try:
                return self._read_root(commit)
            except DcpZarrError:
                replaced = self._is_replaced()
                self.close()
                if not replaced:
                    raise
        raise CorruptionError(f"{self._where!r} is replaced all the time.", path=self._where)

    def __reduce__(self) -> tuple[object, ...]:
        """Open it again where it is unpickled: a descriptor means nothing in another process."""
        return _reopen, (self._path, self._schema.save_id)

    def _read_root(self, commit: LocalCommit) -> bytes:
        try:
            return self._read(zarr_format.DOCUMENT)
        except FileNotFoundError as error:
            if commit.partial.exists():
                raise _incomplete(commit) from error
            raise CheckpointNotFoundError(
                f"There is no checkpoint at {self._where!r}: it has no zarr.json.", path=self._where
            ) from error

    def _read(self, path: str) -> bytes:
        with os.fdopen(self._open(path), "rb") as file:
            return file.read()

    def _open(self, path: str) -> int:
        if self._root < 0:
            raise DcpZarrError(f"{self._where!r} was closed; open it again.", path=self._where)
        return os.open(path, os.O_RDONLY, dir_fd=self._root)

    @property
    def where(self) -> str:
        """Path of the checkpoint."""
        return self._where

    @property
    def schema(self) -> Schema:
        """The schema, read on opening."""
        return self._schema

    @contextmanager
    def open_object(self, array: ArrayLayout, write_chunk: Shape) -> Iterator[_DirectoryObject]:
        """Open a write chunk's file, and read its index."""
        if array.path not in self._checked:
            self._check_document(array.path, self._schema.documents[array.path])
            self._checked.add(array.path)
        path = f"{array.path}/{zarr_format.object_key(array, write_chunk)}"
        try:
            fd = self._open(path)
        except FileNotFoundError as error:
            raise CorruptionError(f"{path!r} is missing{self._since_replaced()}.") from error
        try:
            yield _DirectoryObject.open(fd, path, array)
        finally:
            os.close(fd)

    def damaged_documents(self) -> Iterator[str]:
        """Describe each document that is missing or not the one that was saved."""
        group = zarr_format.document_digest(zarr_format.group_document())
        groups = dict.fromkeys(names.parents(self._schema.documents), group)
        for path, digest in {**groups, **self._schema.documents}.items():
            try:
                self._check_document(path, digest)
            except (CorruptionError, OSError) as error:
                yield str(error)

    def _is_replaced(self) -> bool:
        """Say whether another directory, or none, stands at the path now."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._root))
        except FileNotFoundError:
            return True

    def _since_replaced(self) -> str:
        gone = self._is_replaced()
        return " because the checkpoint was replaced while it was read" if gone else ""

    def _check_document(self, path: str, digest: str) -> None:
        """Raise unless the document of an array or group is the one that was saved."""
        path = f"{path}/{zarr_format.DOCUMENT}"
        try:
            found = zarr_format.document_digest(self._read(path))
        except FileNotFoundError as error:
            raise CorruptionError(f"{path!r} is missing{self._since_replaced()}.") from error
        if found != digest:
            raise CorruptionError(f"{path!r} was changed after the save.")

    def close(self) -> None:
        """Close the directory."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __del__(self) -> None:
        """Close the directory of a source that nobody closed."""
        if getattr(self, "_root", -1) >= 0:
            self.close()


def _reopen(path: str, save_id: str) -> DirectorySource:
    """Open a checkpoint that was pickled open.

    Raises
    ------
    CorruptionError
        If another save stands there now.
    """
    source = DirectorySource(path)
    if source.schema.save_id != save_id:
        raise CorruptionError(f"{path!r} was replaced since it was opened; open it again.")
    return source


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
        raise _incomplete(commit)
    raise CheckpointNotFoundError(
        f"There is no checkpoint at {str(commit.path)!r}.", path=str(commit.path)
    )


def _incomplete(commit: LocalCommit) -> DcpZarrError:
    return IncompleteCheckpointError(
        f"The save to {str(commit.path)!r} never finished; what it wrote is in "
        f"{str(commit.partial)!r}. Load an older checkpoint.",
        path=str(commit.path),
    )


@dataclass(frozen=True, slots=True)
class _DirectoryObject:
    """An open object of a directory."""

    fd: int
    path: str
    array: ArrayLayout
    nbytes: int
    index: NDArray[np.uint64] | None

    @classmethod
    def open(cls, fd: int, path: str, array: ArrayLayout) -> _DirectoryObject:
        nbytes = os.fstat(fd).st_size
        if not zarr_format.has_index(array):
            return cls(fd, path, array, nbytes, None)
        index_nbytes = zarr_format.index_nbytes(array)
        encoded = os.pread(fd, index_nbytes, max(nbytes - index_nbytes, 0))
        return cls(fd, path, array, nbytes, zarr_format.decode_index(encoded, array))

    def extent(self, read_chunk: Shape) -> tuple[int, int]:
        """Return offset and size of a stored read chunk."""
        if self.index is None:
            return 0, self.nbytes
        counts = self.array.read_chunks_per_write_chunk
        offset, nbytes = self.index[
            tuple(c % n for c, n in zip(read_chunk, counts, strict=True))
        ].tolist()
        if offset + nbytes > self.nbytes:
            raise CorruptionError(f"{self.path!r} does not hold it.")
        return offset, nbytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes from `offset` on."""
        got = read_all(self.fd, offset, buffers)
        if got < sum(map(len, buffers)):
            raise CorruptionError(f"{self.path!r} ends at byte {offset + got}.")
