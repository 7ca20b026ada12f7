"""A rank's staging files: what it leaves for the coordinator, on the file system that they share.

Both look names up relative to a directory that they opened or made, so that they stay with their
own save whatever is renamed meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr.commit import STAGING
from dcp_zarr.errors import SaveError
from dcp_zarr.local_files import write_all

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer

OWN = os.O_CREAT | os.O_EXCL
"""Flags of a file that one rank writes alone."""


class Staging:
    """The staging files of one rank.

    Parameters
    ----------
    root
        Descriptor of the partial directory.
    rank
        Group rank.
    """

    def __init__(self, root: int, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}

    def write(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into the file of that name."""
        with self._lock:
            if name not in self._fds:
                self._fds[name] = open_file(f"{STAGING}/{self._rank}.{name}", self._root)
        write_all(self._fds[name], offset, buffers)

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def open_file(path: str, root: int, flags: int = OWN) -> int:
    """Open a file of the partial directory for writing.

    Raises
    ------
    SaveError
        If it is to be this rank's own, and exists already.
    """
    try:
        return os.open(path, os.O_WRONLY | flags, 0o666, dir_fd=root)
    except FileExistsError as error:
        raise SaveError(
            f"{path!r} exists already in the save's own directory: two jobs are saving to one "
            "path, or one rank was started twice.",
            path=path,
        ) from error
