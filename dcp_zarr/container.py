"""The seam: what the engine asks of a container, and nothing else.

A container holds one checkpoint. A save makes a `Target` on each rank, and through it a `Sink`;
a load opens a `Source`. Everything above speaks of arrays, read chunks and write chunks;
everything below of files, offsets or keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema, TensorEntry
    from dcp_zarr.slabs import Slab

Buffer = bytes | memoryview


class Sink(Protocol):
    """Where one rank's bytes go during a save. Its methods are called from several threads."""

    network_calls: int
    """How many calls at once keep it busy, where each waits for a network; else 0."""

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab | None = None,
    ) -> None:
        """Store encoded read chunks of one write chunk, each given with its grid coordinates.

        Without a slab, all read chunks of a write chunk come from one rank, in any order and
        number of calls; with one, as many as it counts.
        """

    def stage(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into the rank's staging file of that name, which only the coordinator reads."""

    def close(self) -> None:
        """Make durable what was placed and staged."""


class Target(Protocol):
    """A container to be. One per rank and save; all of a save's share a path."""

    @property
    def where(self) -> str:
        """Path or address, for messages."""

    def prepare(self, ranks: int) -> None:
        """Make room for a save of so many ranks, before any byte is written. Coordinator only.

        Raises
        ------
        CheckpointExistsError
            If something stands at the path that must not be replaced.
        """

    def reserved_nbytes(self, tensors: Iterable[TensorEntry]) -> int | None:
        """Return what the container needs before all slabs, where it is one file; else None.

        Parameters
        ----------
        tensors
            All tensors of the save, as they are planned. Coordinator only.
        """

    def discard(self) -> None:
        """Remove what a save left that was given up. Coordinator only."""

    def open_sink(self, rank: int, slab: Slab | None) -> Sink:
        """Open the place for a rank's bytes: its slabs, where the container is one file."""

    def open_last_sink(self, ranks: int, tensors: Iterable[TensorEntry]) -> Sink:
        """Open the place for the coordinator's bytes, when so many ranks are done with theirs.

        Parameters
        ----------
        ranks
            How many.
        tensors
            All tensors of the save, as they were planned.
        """

    def read_staged(self, rank: int, name: str, offset: int, nbytes: int) -> bytes:
        """Read from a rank's staging file; fewer bytes where it ends. Coordinator only.

        Raises
        ------
        SaveError
            If the file is not visible from here.
        """

    def check_placed(self, array: ArrayLayout, ranks: Mapping[Shape, int]) -> None:
        """Raise unless an array's objects are all there. Coordinator only.

        Parameters
        ----------
        array
            The array.
        ranks
            For each write chunk, the rank that wrote it.

        Raises
        ------
        SaveError
            With the rank whose objects are not visible from here.
        """

    def join(self, array: ArrayLayout, counts: NDArray[np.int64]) -> None:
        """Complete the object that several ranks wrote. Coordinator only.

        Parameters
        ----------
        array
            The array.
        counts
            For each rank, how many read chunks it placed; last, the coordinator's own.

        Raises
        ------
        SaveError
            If what a rank placed is not visible from here, or not as it was planned.
        """

    def commit(self, schema: Schema) -> None:
        """Write the documents and make the checkpoint readable. Coordinator only."""


class Extent(NamedTuple):
    """Where a stored read chunk lies."""

    offset: int
    """Its first byte in the object."""
    nbytes: int
    """Its size."""
    crc: bytes | None = None
    """Its checksum; None where that is its last bytes."""
    is_checked: bool = True
    """Whether it has a checksum at all."""


class StoredObject(Protocol):
    """An open write chunk."""

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where stored read chunks lie, by their grid coordinates in the array.

        Raises
        ------
        CorruptionError
            If one is missing.
        """

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes from `offset` on.

        Raises
        ------
        CorruptionError
            If the object ends before.
        """


class Source(Protocol):
    """A committed checkpoint, open for reading; safe to use from several threads."""

    network_calls: int
    """As of a `Sink`."""

    @property
    def where(self) -> str:
        """Path or address, for messages."""

    @property
    def schema(self) -> Schema:
        """The schema, read on opening."""

    def damaged_documents(self) -> Iterator[str]:
        """Describe each document that is missing or not the one that was saved."""

    def open_object(
        self, array: ArrayLayout, write_chunk: Shape
    ) -> AbstractContextManager[StoredObject]:
        """Open a write chunk.

        Raises
        ------
        CorruptionError
            If it is missing, or its array's document is not the one that was saved.
        """

    def check_unchanged(self) -> None:
        """Raise where what was read may be of two checkpoints; asked after reading.

        Raises
        ------
        CorruptionError
            If another save to the same place has begun.
        """

    def close(self) -> None:
        """Let go of files; reading afterwards is an error."""
