"""A rank's way into the one file of a save: what all such containers have in common."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr.containers.staging import Staging
from dcp_zarr.local_files import BackgroundSync

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer


class OneFileSink(ABC):
    """A rank's way into the file.

    Parameters
    ----------
    root
        Descriptor of the partial directory; closed with the sink.
    name
        Name of the file in it.
    rank
        Group rank.
    sync
        Whether what is written is made durable on closing.
    """

    network_calls = 0

    def __init__(self, root: int, name: str, rank: int, *, sync: bool) -> None:
        self._root = root
        self._staging = Staging(root, rank)
        self._fd = os.open(name, os.O_WRONLY, dir_fd=root)
        self._sync = BackgroundSync(self._fd, enabled=sync)
        self._lock = threading.Lock()

    @abstractmethod
    def _leave_notes(self) -> None:
        """Stage what the coordinator has to know of what was written."""

    def stage(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into one of the rank's staging files."""
        self._staging.write(name, offset, buffers)

    def close(self) -> None:
        """Leave notes of what was written, and make it durable."""
        try:
            self._leave_notes()
        finally:
            try:
                self._sync.close()
            finally:
                os.close(self._fd)
                os.close(self._root)
                self._staging.close()
