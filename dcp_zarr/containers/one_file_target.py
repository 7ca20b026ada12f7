"""Saving into one file on a local or shared file system: each rank writes in its own slabs."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dcp_zarr.containers.local_target import LocalTarget
from dcp_zarr.slabs import ALIGNMENT, Slab

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dcp_zarr.container import Sink
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.schema import TensorEntry

FILE = "store"
"""Name of the file in the partial directory."""
_ENDLESS = 2**62


class OneFileTarget(LocalTarget):
    """A container to be that is one file."""

    _ranks = 0
    """How many ranks take part; the coordinator knows."""
    _reserved: int | None = None
    """Where slabs begin at the earliest; the coordinator knows."""

    @abstractmethod
    def _sink(self, root: int, rank: int, slab: Slab, *, sync: bool) -> Sink:
        """Return a rank's way into the file; it closes the partial directory, `root`."""

    @abstractmethod
    def _front_nbytes(self, tensors: Iterable[TensorEntry]) -> int:
        """Return what the container needs before all slabs."""

    def reserved_nbytes(self, tensors: Iterable[TensorEntry]) -> int:
        """Return what the container needs before all slabs. Coordinator only."""
        if self._reserved is None:
            self._reserved = self._front_nbytes(tensors)
        return self._reserved

    @abstractmethod
    def _end(self, ranks: int) -> int:
        """Return where what the ranks wrote ends."""

    def prepare(self, ranks: int) -> None:
        """Check what stands at the path, and make the file's directory. Coordinator only."""
        super().prepare(ranks)
        self._ranks = ranks
        (self._commit.partial / FILE).touch(exist_ok=False)

    def open_sink(self, rank: int, slab: Slab | None) -> Sink:
        """Open the file for a rank."""
        root = self._open_partial(rank)
        assert slab is not None  # noqa: S101  where the container is one file
        try:
            return self._sink(root, rank, slab, sync=self._sync)
        except FileNotFoundError as error:
            os.close(root)
            raise self._not_visible(rank) from error

    def open_last_sink(self, ranks: int, tensors: Iterable[TensorEntry]) -> Sink:
        """Open the file behind all that the ranks wrote. Coordinator only."""
        self._commit.check_unchanged()
        # Known already, but where DCP's cache kept the plans.
        reserved = self.reserved_nbytes(tensors)
        start = -(-max(reserved, self._end(ranks)) // ALIGNMENT) * ALIGNMENT
        root = self._open_partial(ranks)
        return self._sink(root, ranks, Slab(start, _ENDLESS, 0, 0, 0, 1), sync=False)

    def join(self, array: ArrayLayout, counts: NDArray[np.int64]) -> None:
        """Do nothing: no object is shared."""
