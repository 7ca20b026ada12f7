"""DCP's `StorageWriter` over the core. DCP's words end here."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_zarr import coordinator, metadata_words, tensors
from dcp_zarr.codecs import CompressionOption, CompressionRules
from dcp_zarr.containers.by_path import allowed, is_hdf5, is_place, new_target, place_of
from dcp_zarr.disk_errors import with_disk_errors
from dcp_zarr.display import rate
from dcp_zarr.errors import OptionError, SaveError
from dcp_zarr.garbage import no_collection
from dcp_zarr.layout_rules import LayoutOptions
from dcp_zarr.placement import SaveOptions, plan_save, rank_slabs
from dcp_zarr.plan_words import FQN, Planned
from dcp_zarr.progress import counted
from dcp_zarr.rank_save import RankPlan, RankSave, rank_result
from dcp_zarr.replicas import Noted, SharedOut
from dcp_zarr.tasks import Limits, check_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from dcp_zarr.container import Target
    from dcp_zarr.containers.by_path import AnyPath
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.slabs import Slab

logger = logging.getLogger(__name__)


class DcpWriter(StorageWriter):
    """DCP's `StorageWriter` over the core; what it saves into, its subclasses say.

    Parameters are those of `dcp_zarr.writer.ZarrStorageWriter`.
    """

    _hdf5: ClassVar[bool]
    """Whether checkpoints are HDF5 files; else Zarr stores."""

    def __init__(
        self,
        path: AnyPath | None,
        *,
        compression: CompressionOption,
        overwrite: bool,
        thread_count: int | None,
        memory_budget_bytes: int,
        read_chunk_bytes: int,
        write_chunk_bytes: int,
        sync_files: bool,
        dtype_encoding: str,
        statistics: bool,
        share_plain_tensors: bool,
        progress: bool,
    ) -> None:
        super().__init__()
        check_count("memory_budget_bytes", memory_budget_bytes)
        check_count("read_chunk_bytes", read_chunk_bytes, most=1 << 30)
        check_count("write_chunk_bytes", write_chunk_bytes)
        if thread_count is not None:
            check_count("thread_count", thread_count)
        if dtype_encoding not in ("native", "bits"):
            raise OptionError(f"dtype_encoding={dtype_encoding!r} is neither 'native' nor 'bits'.")
        layout = LayoutOptions(read_chunk_bytes, write_chunk_bytes)
        rules = CompressionRules.parse(compression)
        self._given = SaveOptions(rules, layout, dtype_encoding, statistics=statistics)
        self._overwrite = overwrite
        self._thread_count = thread_count
        self._memory_budget_bytes = memory_budget_bytes
        self._sync_files = sync_files
        self._share_plain_tensors = share_plain_tensors
        self._progress = progress
        self._began = 0.0
        self._is_coordinator = False
        self._target: Target | None = None
        self._plans: list[SavePlan] = []
        self._planned: Planned | None = None
        self._path = None if path is None else place_of(path)
        self._save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str | None:
        """Where the checkpoint goes."""
        return None if self._path is None else str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether an id can be a path of this writer; DCP asks only its own writers."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. Called on all ranks, or never."""
        if checkpoint_id is not None:
            self._path = place_of(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta | None:
        """Return what DCP records of the storage. Called on all ranks."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ANN401
        """Refuse what cannot be saved rightly. Called on all ranks.

        Raises
        ------
        SaveError
            With ``use_collectives=False``, or where no path was given.
        """
        self._began, self._is_coordinator = time.monotonic(), is_coordinator
        if not kwargs.get("use_collectives", True):
            raise SaveError(
                "dcp_zarr saves one checkpoint for all ranks and needs their plans; call dcp.save "
                "without use_collectives=False."
            )
        if self._path is None:
            raise SaveError(
                f"No path: give {type(self).__name__} one, or dcp.save a checkpoint_id."
            )
        if is_hdf5(self._path) and not self._hdf5:
            raise OptionError(
                f"{self._path!r} has the suffix of an HDF5 file, and ZarrStorageWriter saves Zarr "
                "stores. Use HDF5StorageWriter, or a path that ends in .zarr or .zarr.zip."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what other ranks may hold as well. Called on all ranks at once."""
        noted = Noted.of(plan.items, plain=self._share_plain_tensors)
        return dataclasses.replace(plan, storage_data=noted)

    @with_disk_errors
    @no_collection()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Map every write item to read chunks and pieces, and make room. Coordinator only.

        Returns
        -------
        The plans of all ranks with a `RankPlan` as ``storage_data``: where one plan changes,
        layouts and shares of others may. Where DCP's cache finds no change, plans stay as they are.
        """
        known = self._all_plans(plans)
        shared = SharedOut.of(known)
        planned = Planned.of(shared.plans, shared.told, self._options)
        if known or self._planned is None:  # else DCP's cache keeps the plans of the last save
            self._planned = planned
        placement = plan_save(planned.tensors, planned.objects, self._options)
        if self._target is not None:  # of a save that failed
            self._target.discard()
        self._target = self._new_target()
        self._target.prepare(len(plans))
        if not known:
            return plans
        self._plans = known
        slabs: Sequence[Slab | None] = [None] * len(plans)
        entries = [
            coordinator.tensor_entry(placement.layouts[fqn], plan, self._options)
            for fqn, plan in planned.tensors.items()
        ]
        reserved = self._target.reserved_nbytes(entries)
        if reserved is not None:
            items = [len(plan.items) for plan in shared.plans]
            slabs = rank_slabs(
                placement, planned.tensors, planned.parts, items, self._options, reserved
            )
        described = self._description
        where: dict[str, ArrayLayout | str] = {**placement.paths, **placement.layouts}
        layouts = [*_layouts(shared.plans, planned.fqns, where)]
        rows = placement.slab_rows(planned.parts, planned.counts)
        return [
            dataclasses.replace(
                plan, storage_data=RankPlan(described, rank, mine, own, wholes, slab)
            )
            for rank, (plan, mine, own, wholes, slab) in enumerate(
                zip(shared.plans, layouts, rows, shared.wholes, slabs, strict=True)
            )
        ]

    def _all_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Complete the plans where DCP's cache passes only those that changed; none if none."""
        if all(plan.usable for plan in plans):
            return plans
        if not any(plan.usable for plan in plans):
            return []
        if len(self._plans) != len(plans):
            raise SaveError(
                "DCP's plan cache passes only what changed since a save by another writer. "
                "Keep one writer, or use DefaultSavePlanner(enable_plan_caching=False)."
            )
        return [new if new.usable else old for new, old in zip(plans, self._plans, strict=True)]

    @property
    def _description(self) -> str:
        shared = f"share_plain_tensors={self._share_plain_tensors}"
        return f"{'hdf5' if self._hdf5 else 'zarr'} {self._options} {shared}"

    @property
    def _options(self) -> SaveOptions:
        """The options, as far as the container at the path follows them."""
        assert self._path is not None  # noqa: S101
        return allowed(
            self._given,
            self._path,
            hdf5=self._hdf5,
            memory_budget_bytes=self._memory_budget_bytes,
        )

    def _new_target(self) -> Target:
        assert self._path is not None  # noqa: S101
        return new_target(
            self._path, hdf5=self._hdf5, overwrite=self._overwrite, sync=self._sync_files
        )

    @with_disk_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's read chunks and stage its pieces and objects. Called on all ranks."""
        future: Future[list[WriteResult]] = Future()
        try:
            if not plan.items:
                future.set_result([])
                return future
            rank_plan = self._checked(plan)
            sink = self._new_target().open_sink(rank_plan.rank, rank_plan.slab)
            try:
                rank_save = RankSave(plan, rank_plan, planner, sink, self._options)
                shown = self._progress and self._is_coordinator
                nbytes = rank_save.nbytes if shown else 0  # costs time where items are many
                with counted("saving", nbytes, shown=shown) as done:
                    future.set_result(rank_save.run(self._limits, done))
            finally:
                sink.close()
        except Exception:
            if not tensors.is_alone():  # others wait: DCP tells of it when all ranks are done
                logger.exception("Saving to %s failed on this rank.", self._path)
            raise
        return future

    def _checked(self, plan: SavePlan) -> RankPlan:
        rank_plan = plan.storage_data
        if not isinstance(rank_plan, RankPlan) or rank_plan.options != self._description:
            made_by = getattr(rank_plan, "options", f"another writer ({rank_plan!r:.80})")
            raise SaveError(
                f"This rank's plan was made by {made_by}, but is to be written by "
                f"{self._description}. Give all ranks the same options; with "
                "DefaultSavePlanner(enable_plan_caching=True), use one kind of writer only."
            )
        return rank_plan

    @property
    def _limits(self) -> Limits:
        return Limits.of(self._thread_count, self._memory_budget_bytes)

    @with_disk_errors
    @no_collection()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint and make it visible. Coordinator only."""
        assert self._target is not None  # noqa: S101
        assert self._planned is not None  # noqa: S101
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = None
        told = [rank_result(of_rank) for of_rank in results]
        schema = coordinator.complete(
            self._target,
            self._planned.confirmed(metadata, told, self._options),
            list(metadata.state_dict_metadata),
            told,
            self._options,
            metadata_words.description(metadata, self._save_id),
            self._limits,
        )
        self._target = None
        saved = schema.tensors.values()
        nbytes, stored = sum(e.array.nbytes for e in saved), sum(e.stored_nbytes for e in saved)
        took = rate(nbytes, stored, time.monotonic() - self._began)
        logger.info("Saved %s: %d tensors, %s.", self.checkpoint_id, len(saved), took)


def _layouts(
    plans: Sequence[SavePlan], fqns: Sequence[Sequence[str]], where: Mapping[str, ArrayLayout | str]
) -> Iterator[tuple[ArrayLayout | str, ...]]:
    """Yield for each rank the layout of each write item; of an object, the path."""
    last: Sequence[str] = ()
    found: tuple[ArrayLayout | str, ...] = ()
    for plan, names in zip(plans, fqns, strict=True):
        if len(names) < len(plan.items):  # there are objects, too
            of_parts = iter(names)  # an item may have another name by now: its rank refuses it
            yield tuple(
                where[FQN(i) if i.tensor_data is None else next(of_parts)] for i in plan.items
            )
            continue
        if names != last:  # most ranks have parts of the same tensors
            last, found = names, tuple(map(where.__getitem__, names))
        yield found
