"""Saving into an object store.

Its objects are written where they stay: nothing can be renamed. While ranks write, there is no
root document, so no checkpoint. What stood there before is deleted first, and each object is
written only where there is none, so that no byte of another save survives or comes late.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from dcp_zarr import zarr_format
from dcp_zarr.containers.fetched import Fetched
from dcp_zarr.containers.object_store import refuse_other_processes
from dcp_zarr.containers.object_store_sink import (
    STAGED_BYTES,
    STAGING,
    ObjectStoreSink,
    staged_key,
)
from dcp_zarr.errors import CheckpointExistsError, SaveError, StoreError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dcp_zarr.containers.object_store import ObjectStore
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Schema, TensorEntry
    from dcp_zarr.slabs import Slab

MARK = f"{STAGING}/save"
"""Key of what tells whose save is under way."""
_DOCUMENT_THREADS = 32
"""Documents are small: the more are under way, the better."""
_KEPT_BYTES = 256 << 20
"""Staged bytes that the coordinator keeps: a save's pieces, but for odd ones."""

logger = logging.getLogger(__name__)


class ObjectStoreTarget:
    """A checkpoint to be in an object store.

    Parameters
    ----------
    store
        The store.
    overwrite
        Whether a checkpoint that stands there may be replaced.
    """

    def __init__(self, store: ObjectStore, *, overwrite: bool) -> None:
        self._store = store
        self._overwrite = overwrite
        self._mark = b""
        self._staged: Fetched[memoryview] = Fetched(_KEPT_BYTES, len)

    @property
    def where(self) -> str:
        """Address of the checkpoint."""
        return self._store.where

    def prepare(self, ranks: int) -> None:
        """Check what stands there; mark the place, and delete what is there. Coordinator only."""
        self._store.check_writable()
        if ranks > 1 and self._store.in_one_process:
            refuse_other_processes(self.where)
        root, mark = self._found(zarr_format.DOCUMENT), self._found(MARK)
        if root is None:
            ours = mark is not None or next(self._store.keys(), None) is None
        else:
            ours = zarr_format.is_checkpoint(root)
        if not ours:
            raise CheckpointExistsError(
                f"{self.where!r} holds objects, and is not a dcp_zarr checkpoint; nothing was "
                "written. Remove them, or save to another path.",
                path=self.where,
            )
        if root is not None and not self._overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists at {self.where!r} and overwrite=False.",
                path=self.where,
            )
        self._mark = json.dumps({"save": str(uuid.uuid4()), "ranks": ranks}).encode()
        self._store.write(MARK, [self._mark])
        if root is not None:
            self._store.delete([zarr_format.DOCUMENT])
        if root is not None or mark is not None:
            self._delete_all()

    def _found(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.read(key).buffer)
        except FileNotFoundError:
            return None

    def _delete_all(self, prefix: str = "") -> None:
        """Delete all objects below a key but the mark."""
        keys = [key for key in self._store.keys(prefix) if key != MARK]
        if keys:
            self._store.delete(keys)

    def reserved_nbytes(self, tensors: Iterable[TensorEntry]) -> None:
        """Return None: a store is not one file."""

    def discard(self) -> None:
        """Remove what a save left that was given up. Coordinator only."""
        if self._found(MARK) == self._mark:
            self._delete_all()
            self._store.delete([MARK])

    def _check_unchanged(self) -> None:
        if self._found(MARK) != self._mark:
            raise SaveError(
                f"Another save to {self.where!r} began while this one was writing; this one is "
                "given up. Save to one path from one job at a time.",
                path=self.where,
            )

    def open_sink(self, rank: int, slab: Slab | None = None) -> ObjectStoreSink:
        """Open the store for a rank, and claim its part in the save."""
        mark = self._found(MARK)
        if mark is None:
            raise SaveError(
                f"Rank {rank} does not see {MARK!r} in {self.where!r}, which the coordinator "
                "wrote: is it the same store for all ranks?",
                rank=rank,
                path=self.where,
            )
        ranks = json.loads(mark)["ranks"]
        if rank > ranks:
            raise SaveError(
                f"Rank {rank} takes part in another save to {self.where!r}, of {ranks} ranks; save "
                "to one path from one job at a time.",
                rank=rank,
                path=self.where,
            )
        return ObjectStoreSink(self._store, rank)

    def open_last_sink(self, ranks: int, tensors: Iterable[TensorEntry]) -> ObjectStoreSink:
        """Open the coordinator's own. Coordinator only."""
        self._check_unchanged()
        return self.open_sink(ranks)

    def read_staged(self, rank: int, name: str, offset: int, nbytes: int) -> bytes:
        """Read from a rank's staging file. Coordinator only."""
        found = b""
        while len(found) < nbytes:
            number, start = divmod(offset + len(found), STAGED_BYTES)
            part = self._staged_part(rank, name, number)
            if part is None and not number:
                raise self._not_visible(rank)
            if part is None or len(part) <= start:
                break
            found += part[start : start + nbytes - len(found)]
        return found

    def _staged_part(self, rank: int, name: str, number: int) -> memoryview | None:
        key = staged_key(rank, name, number)
        try:
            return self._staged.get(key, lambda: self._store.read(key).buffer)
        except FileNotFoundError:
            return None

    @cached_property
    def _claims(self) -> set[str]:
        """What the ranks left during the save; listed once all are done."""
        self._check_unchanged()
        return set(self._store.keys(f"{STAGING}/"))

    def check_placed(self, array: ArrayLayout, ranks: Mapping[Shape, int]) -> None:
        """Raise unless the ranks wrote to this store: a request that was answered is durable."""
        for rank in ranks.values():
            if f"{STAGING}/{rank}.claim" not in self._claims:
                raise self._not_visible(rank)

    def _not_visible(self, rank: int) -> SaveError:
        return SaveError(
            f"What rank {rank} wrote is not visible from the coordinator in {self.where!r}: is it "
            "the same store for all ranks?",
            rank=rank,
            path=self.where,
        )

    def join(self, array: ArrayLayout, counts: NDArray[np.int64]) -> None:
        """Do nothing: no object is shared."""

    def commit(self, schema: Schema) -> None:
        """Write the documents, remove what was staged, and write the root. Coordinator only."""
        self._check_unchanged()
        *documents, (_, root) = zarr_format.store_documents(schema)
        with ThreadPoolExecutor(_DOCUMENT_THREADS) as pool:
            list(pool.map(lambda document: self._write_new(*document), documents))
        self._delete_all(f"{STAGING}/")
        self._check_unchanged()
        self._write_new(zarr_format.DOCUMENT, root)
        try:  # another save marks the place before it deletes anything
            self._check_unchanged()
        except SaveError:
            self._store.delete([zarr_format.DOCUMENT])
            raise
        try:
            self._store.delete([MARK])
        except StoreError as error:
            logger.warning("Could not remove the mark of a save that is complete: %s", error)

    def _write_new(self, key: str, document: bytes) -> None:
        try:
            self._store.write_new(key, [document])
        except FileExistsError as error:
            raise SaveError(
                f"{key!r} exists already in {self.where!r}: two jobs are saving to one path.",
                path=self.where,
            ) from error
