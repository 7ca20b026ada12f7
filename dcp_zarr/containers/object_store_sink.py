"""A rank's way into an object store: whole objects, and what it leaves for the coordinator."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_zarr import zarr_format
from dcp_zarr.containers.object_store import NETWORK_CALLS
from dcp_zarr.containers.whole_objects import WholeObjects
from dcp_zarr.errors import SaveError, StoreError

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer
    from dcp_zarr.containers.object_store import ObjectStore
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.slabs import Slab

STAGING = ".partial"
"""Below it lies what is there during a save only; no path of an array has such a name."""
STAGED_BYTES = 4 << 20
"""Staged bytes of one object: a rank's staging files are cut there."""


class ObjectStoreSink:
    """A rank's way into the store.

    Parameters
    ----------
    store
        The store.
    rank
        Group rank.
    """

    network_calls = NETWORK_CALLS

    def __init__(self, store: ObjectStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._waiting = WholeObjects()
        self._lock = threading.Lock()
        self._staged: dict[str, _Staged] = {}
        self._put_new(f"{STAGING}/{rank}.claim", [uuid.uuid4().bytes])

    def place(
        self,
        array: ArrayLayout,
        write_chunk: Shape,
        stored: Sequence[tuple[Shape, Sequence[Buffer]]],
        slab: Slab | None = None,
    ) -> None:
        """Write an object, once all its read chunks are there."""
        content = self._waiting.whole(array, write_chunk, stored)
        if content is None:
            return
        try:
            self._put_new(zarr_format.object_path(array, write_chunk), content)
        except StoreError as error:
            region = str(array.write_grid.box(write_chunk))
            raise StoreError(
                f"Rank {self._rank} could not save tensor {array.fqn!r} {region}: {error}",
                fqn=array.fqn,
                region=region,
                rank=self._rank,
                path=self._store.where,
            ) from error

    def _put_new(self, key: str, content: Sequence[Buffer]) -> None:
        """Write an object that nobody else may write.

        A straggler of a dead job is refused, or whoever finds what it wrote.
        """
        try:
            self._store.write_new(key, content)
        except FileExistsError as error:
            raise SaveError(
                f"{key!r} exists already in {self._store.where!r}: two jobs are saving to one "
                "path, or one rank was started twice.",
                rank=self._rank,
                path=self._store.where,
            ) from error

    def stage(self, name: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write into one of the rank's staging files."""
        content = b"".join(buffers)
        while content:
            number, start = divmod(offset, STAGED_BYTES)
            part, content = content[: STAGED_BYTES - start], content[STAGED_BYTES - start :]
            offset += len(part)
            with self._lock:
                staged = self._staged.setdefault(staged_key(self._rank, name, number), _Staged())
                staged.write(start, part)
                if staged.filled < STAGED_BYTES:
                    continue
                del self._staged[staged_key(self._rank, name, number)]
            self._put_new(staged_key(self._rank, name, number), [memoryview(staged.content)])

    def close(self) -> None:
        """Write what is staged; all else was durable when its request was answered."""
        for key, staged in self._staged.items():
            self._put_new(key, [memoryview(staged.content)])
        self._staged.clear()


class _Staged:
    """A part of a staging file that is being filled, in any order."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.filled = 0

    def write(self, start: int, part: bytes) -> None:
        self.content.extend(bytes(max(start + len(part) - len(self.content), 0)))
        self.content[start : start + len(part)] = part
        self.filled += len(part)


def staged_key(rank: int, name: str, number: int) -> str:
    """Return the key of a part of a rank's staging file."""
    return f"{STAGING}/{rank}.{name}.{number}"
