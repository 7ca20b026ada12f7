"""Whole reads and writes of local files, and making them durable."""

from __future__ import annotations

import errno
import os
import re
import reprlib
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_zarr.errors import OptionError

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer

_MAX_BUFFERS = 512
"""Buffers in one system call; Linux allows 1024."""
_SYNC_BYTES = 32 << 20
"""So much is written before it is made durable."""


def local_path(path: str | bytes | os.PathLike[str]) -> str:
    """Return a path as text.

    Raises
    ------
    OptionError
        If it is no path, is empty, or is an address.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise OptionError(
            f"A path is needed here, not {reprlib.repr(path)} of type {type(path).__name__}."
        )
    text = os.fsdecode(path)
    if not text:
        raise OptionError("The path is empty; give a path that ends in .zarr.")
    # A Path has lost one of the slashes.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        advice = "Addresses are for saving, opening and loading."
        if isinstance(path, os.PathLike):
            advice = "Give an address as text, not as a Path."
        raise OptionError(f"{text!r} is not a local path, as is needed here. {advice}")
    return text


def write_all(fd: int, offset: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after the other from `offset` on, however the system splits it."""
    pending = [memoryview(buffer) for buffer in buffers]
    while pending:
        written = os.pwritev(fd, pending[:_MAX_BUFFERS], offset)
        offset += written
        pending = _advanced(pending, written)


def _advanced(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of buffers after their first `nbytes` bytes."""
    for position, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[position + 1 :]]
        nbytes -= len(buffer)
    return []


def read_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers one after the other from `offset` on; return the bytes read before the end."""
    pending, start = list(buffers), offset
    while pending and (got := os.preadv(fd, pending[:_MAX_BUFFERS], offset)):
        offset += got
        pending = _advanced(pending, got)
    return offset - start


def page_target(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """Return where to write a page; symbolic links are followed.

    Raises
    ------
    OptionError
        If the path has another suffix, so that no checkpoint is replaced; if it is a directory, or
        in none.
    """
    target = Path(os.path.realpath(local_path(path)))
    if target.suffix.lower() not in suffixes:
        raise OptionError(f"{os.fspath(path)!r} does not end in {' or '.join(suffixes)}.")
    if target.is_dir():
        raise OptionError(f"{os.fspath(path)!r} is a directory; name a file in it.")
    if not target.parent.is_dir():
        raise OptionError(f"There is no directory {str(target.parent)!r} to write into; make it.")
    return target


def write_page(target: Path, text: str) -> None:
    """Write a text file in one act: what stood there is replaced whole, or stays."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_text(text, "utf-8")
        sync_path(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class BackgroundSync:
    """Makes a file durable bit by bit, in the background, while it is written.

    Parameters
    ----------
    fd
        The file.
    enabled
        Whether to do anything.
    """

    def __init__(self, fd: int, *, enabled: bool) -> None:
        self._fd = fd
        self._enabled = enabled
        self._lock = threading.Lock()
        self._unsynced = 0
        self._syncs: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1)

    def wrote(self, nbytes: int) -> None:
        """Note that so many bytes were written; begin to make them durable from time to time."""
        with self._lock:
            self._unsynced += nbytes
            due = self._enabled and self._unsynced >= _SYNC_BYTES
            if due and all(sync.done() for sync in self._syncs):
                self._unsynced = 0
                self._syncs.append(self._pool.submit(sync_file, self._fd))

    def close(self) -> None:
        """Return when all is durable; raise where anything is not."""
        self._pool.shutdown()
        for sync in self._syncs:
            sync.result()
        if self._enabled:
            sync_file(self._fd)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory's entries durable."""
    sync_path(path, os.O_DIRECTORY)


def sync_path(path: str | os.PathLike[str], flags: int = 0) -> None:
    """Make a file or a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def sync_file(fd: int) -> None:
    """Make a file durable; file systems that have no such act are left alone."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
