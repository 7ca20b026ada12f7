"""What dead saves left in a directory, and its removal."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dcp_zarr import claims
from dcp_zarr.commit import MARK, REPLACED, STAGING, shown_name
from dcp_zarr.containers.one_file_target import FILE
from dcp_zarr.errors import CheckpointNotFoundError
from dcp_zarr.local_files import local_path, sync_directory
from dcp_zarr.table import Table
from dcp_zarr.zarr_format import DOCUMENT, is_checkpoint

_OBJECT = re.compile(r"zarr\.json|c(\.\d+)*")
"""Names of the files of a Zarr directory."""
OLD_S = 24 * 3600.0
"""A save that wrote nothing for so long is taken for dead, in seconds."""


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A hidden directory beside a checkpoint."""

    path: str
    """Where it is."""
    nbytes: int
    """Bytes of the files in it."""
    idle_s: int
    """Seconds since anything in it was changed."""
    state: str
    """``"left over"``, ``"removed"``, or why it is kept."""


def clean(
    folder: str | os.PathLike[str], *, delete: bool = False, idle_s: float = OLD_S
) -> Table[LeftOver]:
    """List what saves have in hidden directories; remove what dead ones left, if wanted.

    A save is alive for certain where its coordinator, on this host, holds its claim. Whether one on
    another host lives cannot be known: it is taken for dead when it wrote nothing for long.

    Parameters
    ----------
    folder
        The directory in which checkpoints stand; those within are not searched.
    delete
        Whether to remove left-overs.
    idle_s
        A save that wrote nothing for fewer seconds is kept.

    Raises
    ------
    CheckpointNotFoundError
        If there is no such directory.
    """
    where = local_path(folder)
    if not Path(where).is_dir():
        raise CheckpointNotFoundError(f"There is no directory {where!r}.", path=where)
    found = [_looked_at(Path(where, name), idle_s) for name in sorted(os.listdir(where))]
    rows = [row for row in found if row is not None]
    if delete:
        sync_directory(where)  # a swap is durable before what it replaced goes
        rows = [_removed(row, idle_s) if row.state == "left over" else row for row in rows]
    return Table(LeftOver, rows, f"left over in {where}")


def _looked_at(path: Path, idle_s: float) -> LeftOver | None:
    """Say what a hidden directory of a save is; None for anything else."""
    shown = shown_name(path.name)
    if shown is None or path.is_symlink() or not path.is_dir():
        return None
    if path.suffix == ".old" and not path.with_name(shown).exists():
        state = "kept: it is the checkpoint itself, half-way through a swap"
    elif any(claims.is_held(mark) for mark in (path / STAGING).glob(f"{MARK}*")):
        state = "kept: a save holds it"
    elif not _is_ours(path):
        state = "kept: dcp_zarr made nothing of the kind"
    else:
        state = "left over"
    nbytes, changed = 0, 0.0
    for status in _statuses(path):
        nbytes += status.st_size
        changed = max(changed, status.st_mtime, status.st_ctime)
    idle = time.time() - changed
    if state == "left over" and idle < idle_s:
        state = f"kept: it was changed less than {idle_s / 3600:g} h ago; see --idle-hours"
    return LeftOver(str(path), nbytes, max(int(idle), 0), state)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Yield what the system says of a directory and of all in it."""
    yield path.lstat()
    for above, folders, files in os.walk(path):
        for name in [*folders, *files]:
            try:
                yield Path(above, name).lstat()
            except FileNotFoundError:  # a save is writing there
                continue


def _is_ours(path: Path) -> bool:
    """Say whether a directory holds what a save makes, or nothing."""
    names = set(os.listdir(path))
    if not names or names & {STAGING, FILE, REPLACED} or ".stale-" in path.name:
        return True
    try:
        return is_checkpoint((path / DOCUMENT).read_bytes())
    except FileNotFoundError:
        # The rest of a checkpoint whose removal broke off, or of what a loss of power left of one.
        files = (name for _, _, files in os.walk(path) for name in files)
        return all(map(_OBJECT.fullmatch, files))
    except OSError:
        return False


def _removed(row: LeftOver, idle_s: float) -> LeftOver:
    """Remove a left-over, through a descriptor: a save may give its name to another."""
    path = Path(row.path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        again = _looked_at(path, idle_s)
        if again is None or again.state != "left over":
            return again or replace(row, state="gone")
        for entry in os.listdir(folder):
            _remove(entry, folder)
        if os.path.samestat(os.fstat(folder), path.lstat()):
            path.rmdir()
    except OSError as error:
        return replace(row, state=f"kept: {error}")
    finally:
        os.close(folder)
    return replace(row, state="removed")


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=folder)
