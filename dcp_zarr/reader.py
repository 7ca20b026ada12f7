"""`ZarrStorageReader` and `HDF5StorageReader`: DCP's `StorageReader` over the core."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_zarr import engine, metadata_words, tensors
from dcp_zarr.containers.by_path import is_place, open_source, place_of
from dcp_zarr.display import rate
from dcp_zarr.errors import CheckpointNotFoundError, CorruptionError, TensorMismatchError
from dcp_zarr.objects import read_objects
from dcp_zarr.progress import counted
from dcp_zarr.region import Region
from dcp_zarr.target_jobs import target_jobs
from dcp_zarr.tasks import Limits, check_count

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.containers.by_path import AnyPath
    from dcp_zarr.schema import TensorEntry

logger = logging.getLogger(__name__)


class DcpReader(StorageReader):
    """DCP's `StorageReader` over the core: loads a checkpoint, whatever container it is in.

    Parameters
    ----------
    path
        Where the checkpoint stands, or the store that holds it. May be left out where `dcp.load` is
        given a ``checkpoint_id``.
    allow_cast
        Whether values may be rounded into a narrower dtype. Widening is always allowed.
    thread_count
        Worker threads of this rank; by default its share of the cores.
    progress
        Show on the coordinator, where standard error is a terminal, how much of its part is loaded.
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        allow_cast: bool = False,
        thread_count: int | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self._path = None if path is None else place_of(path)
        if thread_count is not None:
            check_count("thread_count", thread_count)
        self._allow_cast = allow_cast
        self._thread_count = thread_count
        self._progress = progress
        self._is_coordinator = False
        self._began = 0.0
        self._source: Source | None = None
        self._load_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind when pickled."""
        return {**self.__dict__, "_source": None}

    @property
    def checkpoint_id(self) -> str | None:
        """Where the checkpoint is."""
        return None if self._path is None else str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether an id can be a path of this reader; DCP asks only its own readers."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. Called on all ranks, or never."""
        if checkpoint_id is not None:
            self._path = place_of(checkpoint_id)
        self._source = None
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """Open the checkpoint and return the `Metadata` that `dcp.save` returned. All ranks.

        Of a checkpoint of more than 100,000 regions, each tensor is told as one, so that DCP plans
        the load in bearable time.

        Raises
        ------
        CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
            If there is none that can be read.
        """
        if kwargs.get("rank") is not None:
            raise CheckpointNotFoundError(
                f"{self._path!r} has no metadata of one rank alone: dcp_zarr never writes it."
            )
        if self._path is None:
            raise CheckpointNotFoundError(
                f"No path: give {type(self).__name__} one, or dcp.load a checkpoint_id."
            )
        self._source = open_source(self._path)
        return metadata_words.metadata_from(self._source.schema)

    def storage_meta(self) -> StorageMeta | None:
        """Return what DCP records of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Note that a load begins. Called on all ranks."""
        self._began, self._is_coordinator = time.monotonic(), is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave a rank's plan as it is. Called on all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell every rank which save the coordinator reads. Coordinator only."""
        save_id = self._opened().schema.save_id
        return [dataclasses.replace(plan, storage_data=save_id) for plan in plans]

    def _opened(self) -> Source:
        if self._source is None:
            self.read_metadata()
        assert self._source is not None  # noqa: S101
        return self._source

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors and objects. Called on all ranks.

        Raises
        ------
        CorruptionError
            If stored bytes are lost or changed; or if the checkpoint was replaced meanwhile.
        TensorMismatchError
            If a tensor would have to be narrowed, or is an object in the checkpoint.
        """
        future: Future[None] = Future()
        try:
            self._read(plan, planner, self._opened())
        except Exception:
            if not tensors.is_alone():  # others wait: DCP tells of it when all ranks are done
                logger.exception("Loading from %s failed on this rank.", self._path)
            raise
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner, source: Source) -> None:
        if plan.storage_data not in (None, source.schema.save_id):
            raise CorruptionError(
                f"{self._path!r} was replaced while it was being loaded: ranks see different "
                "saves. Load it again.",
                path=self.checkpoint_id,
            )
        self._read_objects(plan, planner, source)
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        nbytes, stored = _sizes(items, source)
        jobs = self._jobs(items, planner, source)
        with counted("loading", nbytes, shown=self._progress and self._is_coordinator) as done:
            for job in engine.read(jobs, source, Limits.of(self._thread_count)):
                job.key()
                done(job.region.volume * job.array.itemsize)
        if self._is_coordinator:
            told = rate(nbytes, stored, time.monotonic() - self._began)
            logger.info("Loaded from %s on this rank: %s.", self.checkpoint_id, told)

    def _read_objects(self, plan: LoadPlan, planner: LoadPlanner, source: Source) -> None:
        """Hand over the objects of a plan, in its order."""
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        entries = {i.storage_index.fqn: source.schema.objects[i.storage_index.fqn] for i in items}
        for item in items:
            self._check_wants_object(item.storage_index.fqn, item, planner)
        stored = (entry for entry in entries.values() if not entry.json)
        payloads = {entry.fqn: payload for entry, payload in read_objects(source, stored)}
        for item in items:
            fqn = item.storage_index.fqn
            json = entries[fqn].json
            payload = tensors.object_payload(json[0]) if json else payloads[fqn]
            planner.load_bytes(item, io.BytesIO(payload))

    def _check_wants_object(self, fqn: str, item: ReadItem, planner: LoadPlanner) -> None:
        """Raise where an object would replace a tensor, as DCP's own planner lets it."""
        wanted = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
        if isinstance(wanted, torch.Tensor):
            raise TensorMismatchError(
                f"{fqn!r} is an object in {self._path!r}, but a tensor in the state dict. Drop the "
                "entry, or give it the kind that was saved.",
                fqn=fqn,
            )

    def _jobs(
        self, items: list[ReadItem], planner: LoadPlanner, source: Source
    ) -> Iterator[engine.ReadJob]:
        """Resolve one target after the other; yield what is to be read into it."""
        entries = source.schema.tensors
        for item in items:
            entry = entries[item.storage_index.fqn]
            region = _region(item)
            target = planner.resolve_tensor(item).detach()
            self._check_target(target, entry, region)
            yield from target_jobs(
                entry, region, target, done=partial(planner.commit_tensor, item, target)
            )

    def _check_target(self, target: torch.Tensor, entry: TensorEntry, region: Region) -> None:
        if tuple(target.shape) != region.sizes:
            raise TensorMismatchError(
                f"Tensor {entry.fqn!r} {region} of {self._path!r} has {region.sizes} elements, but "
                f"its target has {tuple(target.shape)}. A load cannot reshape: fix the planner.",
                fqn=entry.fqn,
                region=str(region),
            )
        if tensors.shares_elements(target):
            raise TensorMismatchError(
                f"The target of tensor {entry.fqn!r} was expanded: several of its elements are "
                "one. Load into a tensor of its own, such as target.clone().",
                fqn=entry.fqn,
            )
        check_cast(entry, target.dtype, allow_cast=self._allow_cast, where=self.checkpoint_id)


class ZarrStorageReader(DcpReader):
    """Loads a checkpoint that `ZarrStorageWriter` saved. Parameters are those of `DcpReader`.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> _ = dcp.save({"w": torch.ones(4)}, storage_writer=ZarrStorageWriter("step-1.zarr"))
    >>> state_dict = {"w": torch.zeros(4)}
    >>> dcp.load(state_dict, storage_reader=ZarrStorageReader("step-1.zarr"), no_dist=True)
    >>> state_dict["w"]
    tensor([1., 1., 1., 1.])
    """


class HDF5StorageReader(DcpReader):
    """Loads a checkpoint that `HDF5StorageWriter` saved. Parameters are those of `DcpReader`.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> _ = dcp.save({"w": torch.ones(4)}, storage_writer=HDF5StorageWriter("step-1.h5"))
    >>> state_dict = {"w": torch.zeros(4)}
    >>> dcp.load(state_dict, storage_reader=HDF5StorageReader("step-1.h5"), no_dist=True)
    >>> state_dict["w"]
    tensor([1., 1., 1., 1.])
    """


def check_cast(
    entry: TensorEntry, target: torch.dtype, *, allow_cast: bool, where: str | None
) -> None:
    """Raise where loading into a dtype would round values and that was not allowed."""
    saved = tensors.torch_dtype(entry.dtype.torch_name)
    if not allow_cast and not tensors.widens(saved, target):
        raise TensorMismatchError(
            f"Tensor {entry.fqn!r} is {saved} in {where!r}, but its target is {target}, which does "
            "not hold all its values. Load into the saved dtype, or pass allow_cast=True.",
            fqn=entry.fqn,
        )


def _region(item: ReadItem) -> Region:
    """Return the region of the whole tensor that a read item wants."""
    base = item.storage_index.offset or (0,) * len(item.storage_offsets)
    offsets = tuple(b + o for b, o in zip(base, item.storage_offsets, strict=True))
    return Region(offsets, tuple(item.lengths))


def _sizes(items: list[ReadItem], source: Source) -> tuple[int, int]:
    """Return the bytes that items want, and about how many are stored for them."""
    nbytes, stored = 0, 0.0
    for item in items:
        entry = source.schema.tensors[item.storage_index.fqn]
        wanted = _region(item).volume * entry.array.itemsize
        nbytes += wanted
        stored += entry.stored_nbytes * wanted / max(entry.array.nbytes, 1)
    return nbytes, round(stored)
