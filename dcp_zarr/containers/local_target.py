"""What all containers on a local or shared file system have in common while they are saved."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from dcp_zarr.commit import STAGING, LocalCommit
from dcp_zarr.containers.staging import open_file
from dcp_zarr.errors import CheckpointExistsError, OptionError, SaveError

_MAX_NAME_BYTES = 230
"""A file system allows 255; the hidden siblings have longer names."""

_RANKS = "ranks"
"""Name of the staging file that tells how many ranks take part in the save."""


class LocalTarget(ABC):
    """A container to be.

    Parameters
    ----------
    path
        Where it shall stand.
    overwrite
        Whether a checkpoint that stands there may be replaced.
    sync
        Whether bytes are made durable before the commit.
    """

    _kind: ClassVar[str]
    """What a checkpoint of this kind is."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, sync: bool) -> None:
        self._commit = LocalCommit(path)
        self._overwrite = overwrite
        self._sync = sync

    @property
    def where(self) -> str:
        """Path of the checkpoint."""
        return str(self._commit.path)

    @abstractmethod
    def _replaceable(self, path: Path) -> bool:
        """Say whether what stands at the path is a checkpoint of this kind, or nothing."""

    def prepare(self, ranks: int) -> None:
        """Check what stands at the path, and make the partial directory. Coordinator only."""
        path = self._commit.path
        self._check_name(path)
        self._commit.recover()
        if path.exists() and not self._replaceable(path):
            raise CheckpointExistsError(
                f"{self.where!r} exists and is not a dcp_zarr checkpoint in {self._kind}; nothing "
                "was written. Remove it, or save to another path.",
                path=self.where,
            )
        if path.exists() and not self._overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {self.where!r} and overwrite=False.",
                path=self.where,
            )
        self._commit.prepare(sync=self._sync)
        (self._commit.staging / _RANKS).write_text(str(ranks))

    def _check_name(self, path: Path) -> None:
        """Raise where nothing could be swapped into the path."""
        reason = None
        if path.is_mount():
            reason = "is a mount point, which no directory can replace; save below it"
        elif len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
            reason = f"has a name of more than {_MAX_NAME_BYTES} bytes; choose a shorter one"
        if reason is not None:
            raise OptionError(f"{self.where!r} {reason}.", path=self.where)

    def discard(self) -> None:
        """Remove what a save left that was given up. Coordinator only."""
        self._commit.discard()

    def _open_partial(self, rank: int) -> int:
        """Open the partial directory, and claim a rank's part in the save.

        A straggler of a dead job may find the directory of the next: it is refused, or the rank
        that it pretends to be is, before a byte of a shared file is written.
        """
        try:
            root = os.open(self._commit.partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise SaveError(
                f"Rank {rank} does not see {str(self._commit.partial)!r}, which the coordinator "
                "made: is the path shared by all hosts?",
                rank=rank,
                path=self.where,
            ) from error
        try:
            self._claim(root, rank)
        except BaseException:
            os.close(root)
            raise
        return root

    def _claim(self, root: int, rank: int) -> None:
        with os.fdopen(os.open(f"{STAGING}/{_RANKS}", os.O_RDONLY, dir_fd=root), "rb") as file:
            told = file.read()
        ranks = int(told) if told.isdigit() else 0
        if rank > ranks:
            raise SaveError(
                f"Rank {rank} takes part in another save to {self.where!r}, of {ranks} ranks; save "
                "to one path from one job at a time.",
                rank=rank,
                path=self.where,
            )
        os.close(open_file(f"{STAGING}/{rank}.claim", root))

    def read_staged(self, rank: int, name: str, offset: int, nbytes: int) -> bytes:
        """Read from a rank's staging file. Coordinator only."""
        try:
            fd = os.open(self._commit.staging / f"{rank}.{name}", os.O_RDONLY)
        except FileNotFoundError as error:
            raise self._not_visible(rank) from error
        try:
            left = os.fstat(fd).st_size - offset
            return os.pread(fd, max(min(nbytes, left), 0), offset)
        finally:
            os.close(fd)

    def _read_notes(self, rank: int, name: str) -> bytes:
        """Read the whole of a rank's staging file; nothing where there is none."""
        try:
            return (self._commit.staging / f"{rank}.{name}").read_bytes()
        except FileNotFoundError:
            return b""

    def _not_visible(self, rank: int) -> SaveError:
        return SaveError(
            f"Rank {rank}'s files are not visible from the coordinator below {self.where!r}: is "
            "the path shared by all hosts?",
            rank=rank,
            path=self.where,
        )
