"""What a failing file system means, in words."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dcp_zarr.errors import DcpZarrError, SaveError

_TO_DO = {
    errno.ENOSPC: "Free space there, or save to another disk.",
    errno.EDQUOT: "The quota is used up: free space, or have it raised.",
    errno.EFBIG: "Have the limit of a file's size raised (ulimit -f), or save a directory.",
    errno.EROFS: "Have it mounted for writing, or save to another file system.",
    errno.EACCES: "Have the right to write there given, or save elsewhere.",
    errno.EPERM: "Have the right to write there given, or save elsewhere.",
    errno.EMFILE: "Have the limit of open files raised (ulimit -n).",
    errno.ENFILE: "Have the limit of open files of this machine raised.",
    errno.EXDEV: "Save into a directory that is one file system, without mounts in it.",
}
_OTHERWISE = "Look after the disk or file system, then save again."


class HasCheckpointId(Protocol):
    """A writer."""

    @property
    def checkpoint_id(self) -> str | None:
        """Where the checkpoint goes."""


Writer = TypeVar("Writer", bound=HasCheckpointId)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_disk_errors(
    method: Callable[Concatenate[Writer, Given], Result],
) -> Callable[Concatenate[Writer, Given], Result]:
    """Have a step of a save say in words what the file system refused."""

    @wraps(method)
    def step(writer: Writer, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return method(writer, *args, **kwargs)
        except OSError as error:
            if isinstance(error, DcpZarrError):
                raise
            path = writer.checkpoint_id
            raise SaveError(
                f"The save to {path!r} was given up: {error}. "
                f"{_TO_DO.get(error.errno or 0, _OTHERWISE)} A checkpoint that stood there before "
                "still does.",
                path=path,
            ) from error

    return step


@contextmanager
def opening(path: str) -> Iterator[None]:
    """Say in words that a checkpoint cannot be opened, and why."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DcpZarrError):
            raise
        raise DcpZarrError(
            f"{path!r} cannot be opened: {error}. Look after its rights, and after the disk.",
            path=path,
        ) from error
