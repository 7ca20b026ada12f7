"""A file that its holder has locked, so that others know that the holder lives."""

from __future__ import annotations

import contextlib
import fcntl
import os


class Claim:
    """A new file that this process holds locked until it is released, or the process ends.

    The lock is advisory (flock(2)): where a file system has none, or tells other hosts nothing of
    it, the file says only that it is there.

    Parameters
    ----------
    path
        Of the file, which must not exist.
    """

    _fd = -1

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Let go of the file, which stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Let go of what nobody released."""
        self.release()

    def __reduce__(self) -> tuple[object, ...]:
        """Hold nothing where it is unpickled."""
        return object.__new__, (Claim,)


def is_held(path: str | os.PathLike[str]) -> bool:
    """Say whether a process is known to hold a claim; one on another host may not be.

    One that may not be looked at is taken for held.
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False
