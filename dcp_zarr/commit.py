"""How a save on a local (or shared) file system becomes visible: all at once, or not at all.

Everything is written below a hidden sibling, ``.{name}.partial``. The commit swaps it with what
stands at the path. Where the file system cannot exchange two names in one act, the old checkpoint
steps aside as ``.{name}.old`` for a moment, and readers look there when the name is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from dcp_zarr.claims import Claim
from dcp_zarr.errors import SaveError
from dcp_zarr.local_files import sync_directory

logger = logging.getLogger(__name__)

STAGING = "~_staging"
"""Directory within the partial one for what is no part of the checkpoint; the commit removes it."""

MARK = "save-"
"""How the name of the file begins there that is the coordinator's claim, and its save's mark."""

REPLACED = "replaced"
"""Second name of a file that is replaced, until that is durable."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


def shown_name(name: str) -> str | None:
    """Return the name of the checkpoint that a hidden sibling belongs to; None for other names."""
    found = re.fullmatch(r"\.(.+)\.(partial|commit|old|stale-[0-9a-f]{8})", name, re.DOTALL)
    return found and found[1]


class LocalCommit:
    """The names that one save uses, and the acts of its commit.

    Parameters
    ----------
    path
        Where the checkpoint shall stand; symbolic links are followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.partial = self._sibling("partial")
        self.staging = self.partial / STAGING
        self.old = self._sibling("old")
        self._committing = self._sibling("commit")
        self._mark = f"{MARK}{uuid.uuid4().hex}"
        self._claim: Claim | None = None

    def _sibling(self, word: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{word}")

    def recover(self) -> None:
        """Put the old checkpoint back where a swap was broken off half-way."""
        if self.old.exists() and not self.path.exists():
            self.old.rename(self.path)

    def prepare(self, *, sync: bool) -> None:
        """Make the empty partial directory; what dead saves left is moved aside and removed.

        A straggler of such a save goes on writing into the directory that was moved.

        Parameters
        ----------
        sync
            Make durable what else a loss of power could undo: directories above the path, and the
            swap of a save that died before that was, whose old checkpoint goes here.
        """
        _make_directory(self.path.parent, sync=sync)
        leftovers = [p for p in (self.partial, self._committing, self.old) if p.exists()]
        if leftovers and sync:
            sync_directory(self.path.parent)
        for leftover in leftovers:
            self._move_aside(leftover)
        for stale in self._stale():
            _remove(stale)
        self.staging.mkdir(parents=True)
        self._claim = Claim(self.staging / self._mark)

    def _stale(self) -> Iterator[Path]:
        """Return what was moved aside."""
        return self.path.parent.glob(f".{glob.escape(self.path.name)}.stale-*")

    def _move_aside(self, leftover: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            leftover.rename(self._sibling(f"stale-{uuid.uuid4().hex[:8]}"))

    def discard(self) -> None:
        """Remove the partial directory, if it is still this save's."""
        if (self.staging / self._mark).exists():
            self._move_aside(self.partial)
            for stale in self._stale():
                _remove(stale)

    def check_unchanged(self) -> None:
        """Raise unless the partial directory is still the one that `prepare` made.

        Raises
        ------
        SaveError
            If another save to the same path has taken it.
        """
        if not (self.staging / self._mark).exists():
            raise self._taken()

    def _taken(self) -> SaveError:
        return SaveError(
            f"Another save to {str(self.path)!r} began while this one was writing; this one is "
            "given up. Save to one path from one job at a time.",
            path=str(self.path),
        )

    def commit(self, *, sync: bool) -> None:
        """Put the partial directory in the place of the path, and remove what stood there.

        Parameters
        ----------
        sync
            Make the swap durable before anything old is removed.
        """
        self._take()
        shutil.rmtree(self._committing / STAGING)
        self._show(self._committing, sync=sync)

    def commit_directory(self, name: str, *, sync: bool) -> None:
        """Put a directory of the partial one in the place of the path.

        Parameters
        ----------
        name
            Of the directory, whose content is durable already.
        sync
            Make the swap durable before anything old is removed.
        """
        self._take()
        self._show(self._committing / name, sync=sync)
        _remove(self._committing)

    def _show(self, new: Path, *, sync: bool) -> None:
        """Put a directory in the place of the path, and remove what stood there."""
        if sync:
            sync_directory(new)
        replaced = self._swap(new)
        if sync:
            try:
                sync_directory(self.path.parent)
            except OSError:
                # What was new stays as a left-over: of two swaps, the second may be undone alone.
                self._swap_back(new, replaced)
                raise
        if replaced is not None:
            _remove(replaced)

    def commit_file(self, name: str, *, sync: bool) -> None:
        """Put a file of the partial directory in the place of the path.

        Parameters
        ----------
        name
            Of the file; durable already.
        sync
            Make the swap durable.
        """
        self._take()
        old, first = self._committing / REPLACED, not self.path.exists()
        with contextlib.suppress(OSError):  # nothing stands there, or no links are to be had
            os.link(self.path, old)
        (self._committing / name).replace(self.path)
        if sync:
            try:
                sync_directory(self.path.parent)
            except OSError:
                if old.exists():
                    old.replace(self.path)
                elif first:
                    self.path.unlink()
                _remove(self._committing)
                raise
        _remove(self._committing)

    def _take(self) -> None:
        """Give the partial directory another name, so that what is checked is what is swapped."""
        self.partial.rename(self._committing)
        if not (self._committing / STAGING / self._mark).exists():
            self._committing.rename(self.partial)
            raise self._taken()

    def _swap(self, new: Path) -> Path | None:
        """Give the path to the new checkpoint; return where the old one is."""
        if not self.path.exists():
            new.rename(self.path)
            return None
        if exchange(new, self.path):
            return new
        self.path.rename(self.old)
        new.rename(self.path)
        return self.old

    def _swap_back(self, new: Path, replaced: Path | None) -> None:
        """Give the path back: a save that says it failed leaves what stood there."""
        if replaced == new:
            exchange(new, self.path)
            return
        self.path.rename(new)
        if replaced is not None:
            replaced.rename(self.path)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one act; return False where the system cannot (renameat2(2))."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _make_directory(path: Path, *, sync: bool) -> None:
    """Make a directory and those above it."""
    missing = [above for above in (path, *path.parents) if not above.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing if sync else ():
        sync_directory(made.parent)


def _remove(path: Path) -> None:
    """Remove a left-over; that it stays is no reason to fail a save that is complete."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("Could not remove %s, left over from a replaced save: %s", path, error)
