"""The checkpoints of one run, side by side: how statistics of tensors change from step to step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from glob import glob
from pathlib import Path
from typing import Self, overload

from dcp_zarr import run_folder
from dcp_zarr.checkpoint import Checkpoint
from dcp_zarr.errors import CheckpointNotFoundError, OptionError, TensorNotFoundError
from dcp_zarr.local_files import local_path
from dcp_zarr.opening import open_checkpoint
from dcp_zarr.run_folder import natural, step_in_name
from dcp_zarr.table import Table
from dcp_zarr.tensor_statistics import TensorStatistics

_STATISTICS = tuple(
    field.name for field in fields(TensorStatistics) if field.type in ("int", "float")
)


@dataclass(frozen=True, slots=True)
class TracePoint:
    """One statistic of one tensor in one checkpoint of a series."""

    checkpoint: str
    """Path of the checkpoint."""
    step: int
    """Its step: the last number in its name, suffix aside; without one, its place in the series."""
    fqn: str
    """Fully qualified name of the tensor."""
    value: float
    """The statistic; NaN where no value is finite."""


def series(pattern: str | os.PathLike[str]) -> CheckpointSeries:
    """Open the checkpoints of a run. No torch; only their schemas are read.

    Parameters
    ----------
    pattern
        Path of the checkpoints, of any container: ``*``, ``?`` and ``[0-9]`` match as in a shell,
        ``**`` any directories. Or a directory in which they stand: of those, the complete ones.

    Raises
    ------
    CheckpointNotFoundError
        If it matches nothing.
    IncompleteCheckpointError, FormatError, CorruptionError
        If it matches what is no checkpoint that can be read.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> for step in (9, 10):
    ...     _ = dcp_zarr.save({"w": torch.full((2,), float(step))}, f"step-{step}.zarr")
    >>> with dcp_zarr.series("step-*.zarr") as run:
    ...     [(point.step, point.value) for point in run.trace("mean", "w")]
    [(9, 9.0), (10, 10.0)]
    """
    text = local_path(pattern)
    # Path.glob takes no pattern that begins with a slash.
    paths = sorted(glob(text, recursive=True), key=natural)  # noqa: PTH207
    if len(paths) == 1 and Path(paths[0]).is_dir():
        paths = run_folder.checkpoints(paths[0]) or paths
    if not paths:
        raise CheckpointNotFoundError(
            f"No path matches {text!r}. Give a pattern such as 'runs/x/step-*.zarr'.", path=text
        )
    with ExitStack() as opened:
        checkpoints = [opened.enter_context(open_checkpoint(path)) for path in paths]
        opened.pop_all()
    return CheckpointSeries(checkpoints)


class CheckpointSeries(Sequence[Checkpoint]):
    """Open checkpoints in the order of the numbers in their names."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._checkpoints = tuple(checkpoints)

    @overload
    def __getitem__(self, index: int) -> Checkpoint: ...

    @overload
    def __getitem__(self, index: slice) -> CheckpointSeries: ...

    def __getitem__(self, index: int | slice) -> Checkpoint | CheckpointSeries:
        """Return a checkpoint, or a part of the series."""
        found = self._checkpoints[index]
        return found if isinstance(found, Checkpoint) else CheckpointSeries(found)

    def __len__(self) -> int:
        """Return the number of checkpoints."""
        return len(self._checkpoints)

    def __repr__(self) -> str:
        """Name the first and the last."""
        ends = f", from {self[0].path!r} to {self[-1].path!r}" if len(self) else ""
        return f"CheckpointSeries of {len(self)}{ends}"

    @property
    def steps(self) -> list[int]:
        """The step of each checkpoint, as in `TracePoint`."""
        steps = [step_in_name(checkpoint.path) for checkpoint in self]
        return [place if step is None else step for place, step in enumerate(steps)]

    def trace(
        self, statistic: str, pattern: str = "", *, thread_count: int | None = None
    ) -> Table[TracePoint]:
        """Return a statistic of each tensor in each checkpoint, a row for each.

        Where saves had ``statistics=True`` nothing is read; else tensors are read whole.

        Parameters
        ----------
        statistic
            A number in `TensorStatistics`, such as ``"std"``.
        pattern
            Name or pattern of tensors; all by default. Not every checkpoint must have some.
        thread_count
            Worker threads; by default this process' share of the cores.

        Raises
        ------
        OptionError
            If there is no such statistic.
        TensorNotFoundError
            If the pattern selects nothing in any checkpoint.
        CorruptionError
            If stored bytes are lost or changed.
        """
        if statistic not in _STATISTICS:
            raise OptionError(
                f"There is no statistic {statistic!r}; there are {', '.join(_STATISTICS)}."
            )
        points = (
            TracePoint(part.path, step, row.fqn, getattr(row, statistic))
            for step, part in self._selected(pattern)
            for row in part.iter_stats(thread_count=thread_count)
        )
        return Table(TracePoint, points, f"{statistic} of {pattern or 'all tensors'}")

    def _selected(self, pattern: str) -> Iterator[tuple[int, Checkpoint]]:
        """Yield step and selected part of the checkpoints that have one."""
        missing = []
        for step, checkpoint in zip(self.steps, self, strict=True):
            try:
                yield step, checkpoint.select(pattern)
            except TensorNotFoundError as error:
                missing.append(error)
        if missing and len(missing) == len(self):
            raise missing[-1]

    def close(self) -> None:
        """Close all checkpoints."""
        for checkpoint in self:
            checkpoint.close()

    def __enter__(self) -> Self:
        """Return the series itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()
