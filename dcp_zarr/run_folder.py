"""The checkpoints in a directory: which are complete, and which is the last."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dcp_zarr.commit import shown_name
from dcp_zarr.errors import DcpZarrError, FormatError, OptionError
from dcp_zarr.local_files import local_path
from dcp_zarr.opening import is_complete

logger = logging.getLogger(__name__)

_SUFFIX = re.compile(r"(\.zarr)?(\.zip|\.h5|\.hdf5)?$", re.IGNORECASE)


def checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the complete checkpoints in a directory, in the order of their steps.

    The step of a checkpoint is the last number in its name, suffix aside; those without one come
    first. What is no checkpoint is left out, and so is one that is damaged where it is opened,
    with a warning in the log. Only schemas are read; no torch.

    Parameters
    ----------
    folder
        The directory; those within are not searched. One that does not exist has no checkpoint.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> for step in (9, 10):
    ...     _ = dcp_zarr.save({"w": torch.ones(2)}, f"runs/step-{step}.zarr")
    >>> checkpoints("runs")
    ['runs/step-9.zarr', 'runs/step-10.zarr']
    """
    return [path for path in _by_step(folder) if _can_be_opened(path)]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the complete checkpoint with the highest step in a directory.

    A save that never finished is none. Parameters and rules are those of `checkpoints`.

    Returns
    -------
    None where there is none: the run begins.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> latest("runs") is None
    True
    >>> _ = dcp_zarr.save({"w": torch.ones(2)}, "runs/step-100.zarr")
    >>> latest("runs")
    'runs/step-100.zarr'
    """
    return next(filter(_can_be_opened, reversed(_by_step(folder))), None)


def step_in_name(path: str | os.PathLike[str]) -> int | None:
    """Return the last number in a checkpoint's name, suffix aside; None without one."""
    numbers = re.findall(r"\d+", _SUFFIX.sub("", Path(path).name))
    return int(numbers[-1]) if numbers else None


def natural(path: str) -> list[str | int]:
    """Order numbers within text by their size."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _by_step(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of what may be checkpoints, the last step last."""

    def order(path: str) -> tuple[int, list[str | int]]:
        step = step_in_name(path)
        return -1 if step is None else step, natural(path)

    return sorted(_candidates(local_path(folder)), key=order)


def _candidates(folder: str) -> Iterator[str]:
    """Yield the paths in a directory at which dcp_zarr may have saved."""
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise OptionError(
            f"{folder!r} is a file, not a directory in which checkpoints stand."
        ) from None
    for name in names:
        shown = shown_name(name)
        # A swap that was broken off: readers find the old checkpoint all the same.
        if shown is not None and shown not in names and name.endswith(".old"):
            yield os.path.join(folder, shown)
        path = Path(folder, name)
        if not name.startswith(".") and (path.is_dir() or _SUFFIX.search(name)[0]):  # type: ignore[index]
            yield os.path.join(folder, name)


def _can_be_opened(path: str) -> bool:
    try:
        return is_complete(path)
    except FormatError:
        return False
    except DcpZarrError as error:
        logger.warning("%s is passed over: %s", path, error)
        return False
