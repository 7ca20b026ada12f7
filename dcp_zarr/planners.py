"""DCP's load planner, made safe: names and kinds are compared first, and objects run no code."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_zarr import names, tensors
from dcp_zarr.errors import TensorMismatchError, TensorNotFoundError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` did; names are FQNs in the checkpoint."""

    loaded: tuple[str, ...]
    """Entries that were loaded."""
    missing: tuple[str, ...]
    """Wanted by the target, but not in the checkpoint; left as they were."""
    unexpected: tuple[str, ...]
    """In that part of the checkpoint, but not wanted by the target."""

    def __repr__(self) -> str:
        """Count what was loaded, and name what was not."""
        return (
            f"LoadReport: {len(self.loaded)} loaded, missing: {_some(self.missing)}, "
            f"unexpected: {_some(self.unexpected)}"
        )


class SafeLoadPlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that says what does not fit, before anything is read.

    Parameters
    ----------
    prefix
        Part of the checkpoint that the state dict stands for; names below it that the state dict
        does not want are unexpected.
    strict
        Raise where names are missing or, below `prefix`, unexpected; else leave them out.
    weights_only
        Refuse objects whose unpickling could run code. DCP's own planner runs it.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> _ = save({"w": torch.ones(2), "step": 7}, "step-7.zarr")
    >>> state, planner = {"w": torch.zeros(2)}, SafeLoadPlanner(strict=False)
    >>> dcp.load(state, storage_reader=ZarrStorageReader("step-7.zarr"), planner=planner)
    >>> planner.report
    LoadReport: 1 loaded, missing: none, unexpected: 'step'
    """

    def __init__(self, prefix: str = "", *, strict: bool = True, weights_only: bool = True) -> None:
        super().__init__(allow_partial_load=not strict)
        self._prefix = prefix
        self._weights_only = weights_only
        self.report = LoadReport((), (), ())
        """What the last load did; empty before."""

    def create_local_plan(self) -> LoadPlan:
        """Compare names, kinds and sizes, then plan. Called on all ranks.

        Raises
        ------
        TensorNotFoundError
            If `strict`, and names are missing or unexpected.
        TensorMismatchError
            If an entry is of another kind or size.
        """
        assert self.metadata is not None  # noqa: S101
        stored = self.metadata.state_dict_metadata
        below = [fqn for fqn in stored if not self._prefix or fqn.startswith(self._prefix + ".")]
        self.report = LoadReport(
            loaded=tuple(fqn for fqn in self.state_dict if fqn in stored),
            missing=tuple(fqn for fqn in self.state_dict if fqn not in stored),
            unexpected=tuple(fqn for fqn in below if fqn not in self.state_dict),
        )
        if not self.allow_partial_load and (self.report.missing or self.report.unexpected):
            raise TensorNotFoundError(
                "The checkpoint and the state dict differ. Missing in the checkpoint: "
                f"{_some(self.report.missing, stored)}. Not wanted by the state dict: "
                f"{_some(self.report.unexpected)}. Pass strict=False to load the rest."
            )
        for fqn in self.report.loaded:
            _check_fits(fqn, stored[fqn], self.state_dict[fqn])
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object over, unless unpickling it could run code."""
        if self._weights_only:
            # Once the restricted unpickler has taken the bytes, the other does the same.
            tensors.object_value(value.getbuffer(), read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def _check_fits(fqn: str, stored: object, wanted: object) -> None:
    """Raise where an entry is of another kind or size than what it is to be loaded into."""
    is_tensor = isinstance(wanted, torch.Tensor)
    if isinstance(stored, TensorStorageMetadata) != is_tensor:
        kinds = ("an object", "a tensor")
        raise TensorMismatchError(
            f"{fqn!r} is {kinds[not is_tensor]} in the checkpoint, but {kinds[is_tensor]} in the "
            "state dict. Drop the entry, or give it the kind that was saved.",
            fqn=fqn,
        )
    if isinstance(stored, TensorStorageMetadata) and isinstance(wanted, torch.Tensor):
        found, expected = tuple(stored.size), tuple(wanted.shape)
        if found != expected:
            raise TensorMismatchError(
                f"Tensor {fqn!r} is {found} in the checkpoint, but the state dict wants {expected}."
                " A load cannot reshape: drop the entry, or fix the model.",
                fqn=fqn,
            )


def _some(fqns: tuple[str, ...], stored: Iterable[str] = ()) -> str:
    """List a few names, each with what is near it in the checkpoint."""
    if not fqns:
        return "none"
    shown = ", ".join(repr(fqn) + names.near(fqn, stored) for fqn in fqns[:3])
    return f"{len(fqns)}, such as {shown}" if len(fqns) > 3 else shown  # noqa: PLR2004
