"""What all committed checkpoints on a local or shared file system have in common."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dcp_zarr.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    DcpZarrError,
    IncompleteCheckpointError,
)

if TYPE_CHECKING:
    from dcp_zarr.commit import LocalCommit
    from dcp_zarr.schema import Schema


class LocalSource:
    """A committed checkpoint, held by a descriptor: it stays the one that was opened.

    Parameters
    ----------
    path
        Path of the checkpoint, with links resolved.
    where
        The path as it was given, for messages.
    """

    network_calls = 0
    _schema: Schema
    _fd = -1
    """Descriptor of the directory or file, while it is open."""

    def __init__(self, path: str, where: str) -> None:
        self._path = path
        self._where = where

    def __reduce__(self) -> tuple[object, ...]:
        """Open it again where it is unpickled: a descriptor means nothing in another process."""
        return _reopen, (type(self), self._path, self._schema.save_id)

    @property
    def where(self) -> str:
        """Path of the checkpoint."""
        return self._where

    @property
    def schema(self) -> Schema:
        """The schema, read on opening."""
        return self._schema

    def _opened(self) -> int:
        """Return the descriptor; raise where it was closed."""
        if self._fd < 0:
            raise DcpZarrError(f"{self._where!r} was closed; open it again.", path=self._where)
        return self._fd

    def _is_replaced(self) -> bool:
        """Say whether another checkpoint, or none, stands at the path now."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def check_unchanged(self) -> None:
        """Do nothing: the checkpoint is held by a descriptor."""

    def close(self) -> None:
        """Close the directory or file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Close what nobody closed."""
        self.close()


def open_committed(commit: LocalCommit, where: str) -> int:
    """Open a checkpoint that is one file.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError
        If there is none.
    """
    try:
        return os.open(commit.path, os.O_RDONLY)
    except FileNotFoundError as error:
        if commit.partial.exists():
            raise incomplete(commit) from error
        raise CheckpointNotFoundError(
            f"There is no checkpoint at {where!r}.", path=where
        ) from error


def incomplete(commit: LocalCommit) -> DcpZarrError:
    """Return the error of a save that never finished."""
    return IncompleteCheckpointError(
        f"The save to {str(commit.path)!r} never finished; what it wrote is in "
        f"{str(commit.partial)!r}. Load an older checkpoint.",
        path=str(commit.path),
    )


def _reopen(kind: type[LocalSource], path: str, save_id: str) -> LocalSource:
    """Open a checkpoint that was pickled open.

    Raises
    ------
    CorruptionError
        If another save stands there now.
    """
    source = kind(path)  # type: ignore[call-arg]
    if source.schema.save_id != save_id:
        raise CorruptionError(f"{path!r} was replaced since it was opened; open it again.")
    return source
