"""A checkpoint that is open: names, shapes and slices. numpy is enough; torch comes on request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Self

from dcp_zarr import layer_maps, listing, names
from dcp_zarr.comparison import TensorDifference, differences, renamed
from dcp_zarr.errors import TensorNotFoundError
from dcp_zarr.lazy_tensor import LazyTensor
from dcp_zarr.moments import update_sizes
from dcp_zarr.objects import Objects
from dcp_zarr.pictures.tree import Tree, summary_tree
from dcp_zarr.progress import tracked
from dcp_zarr.table import Table
from dcp_zarr.tasks import Limits
from dcp_zarr.tensor_statistics import TensorStatistics, statistics
from dcp_zarr.totals import Total, totals
from dcp_zarr.verification import Damage, damage

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import DTypeLike
    from torch.distributed.checkpoint.metadata import Metadata

    from dcp_zarr.container import Source
    from dcp_zarr.pictures.picture import Picture


class Checkpoint(Mapping[str, "LazyTensor"]):
    """A committed checkpoint: a mapping from the FQNs of its tensors to lazy tensors.

    Entries that are not tensors are in `objects`. May be used from several threads.
    """

    def __init__(self, source: Source, fqns: Collection[str] | None = None) -> None:
        self._source = source
        self._schema = source.schema if fqns is None else source.schema.only(fqns)
        self._entries = self._schema.tensors
        self._objects = self._schema.objects

    @property
    def path(self) -> str:
        """Where the checkpoint is."""
        return self._source.where

    @property
    def objects(self) -> Mapping[str, Any]:
        """What is not a tensor, by FQN; values are read when asked for."""
        return Objects(self._source, self._objects)

    @property
    def params(self) -> int:
        """Number of elements of all tensors; one that has two names counts twice."""
        return sum(prod(entry.array.shape) for entry in self._entries.values())

    def select(self, pattern: str) -> Checkpoint:
        """Return the part of the checkpoint that a name or pattern selects; nothing is read.

        Parameters
        ----------
        pattern
            A name, with all below it; ``*`` in a segment, ``**`` across, ``[0-3]`` for numbers.

        Raises
        ------
        TensorNotFoundError
            If it selects nothing.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"a": torch.ones(3), "b": torch.ones(2)}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr").select("a").params
        3
        """
        fqns = [*self._entries, *self._objects]
        return Checkpoint(self._source, {*names.select(pattern, fqns, where=repr(self.path))})

    def load(
        self, *, flat: bool = False, weights_only: bool = True, thread_count: int | None = None
    ) -> dict[str, Any]:
        """Read everything into a state dict of new CPU tensors; see `load` for the options.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"model": {"w": torch.ones(2)}, "step": 7}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr").select("model").load()
        {'model': {'w': tensor([1., 1.])}}
        """
        from dcp_zarr import state_dicts  # noqa: PLC0415

        limits = Limits.of(thread_count)
        values = state_dicts.load_entries(
            self._schema.entries, self._source, limits, weights_only=weights_only
        )
        return values if flat else state_dicts.nested(values, self._schema.planner_data or {})

    def to_xarray(self, dtype: DTypeLike | None = "float32") -> xr.DataTree:
        """Return the tensors as a tree of lazy xarray variables. Needs xarray, and no torch.

        The tree is that which ``xarray.open_datatree`` shows of the Zarr store; attributes say FQN
        and torch dtype. Objects that JSON holds are attributes of the root.

        Parameters
        ----------
        dtype
            To what floating-point values are cast when they are read; None leaves them as they
            are. Integers stay as they are, and complex32 comes as complex64.

        Raises
        ------
        OptionError
            If `dtype` is no floating-point dtype of numpy, or xarray is not installed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"model": {"w": torch.ones(4, 2).bfloat16()}}, "step-1.zarr")
        >>> tree = dcp_zarr.open_checkpoint("step-1.zarr").to_xarray()
        >>> tree["model/w"].sum("n2").values
        array([2., 2., 2., 2.], dtype=float32)
        """
        from dcp_zarr import xarray_view  # noqa: PLC0415  xarray takes long, and may be missing

        return xarray_view.data_tree(self, self._objects, self._source.schema, dtype)

    def metadata(self) -> Metadata:
        """Return DCP's `Metadata`, as `dcp.save` returned it; of a selection, what it selects.

        Above 100,000 regions each tensor is told as one. Needs torch.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> saved = dcp_zarr.save({"w": torch.ones(4)}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr").metadata() == saved
        True
        """
        from dcp_zarr import metadata_words  # noqa: PLC0415

        return metadata_words.metadata_from(self._schema)

    def totals(self) -> Table[Total]:
        """Return tensors, elements and bytes for each first segment of a name, and dtype."""
        return Table(Total, totals(self._entries.values()), self.path)

    def stats(
        self, *, stored: bool = True, progress: bool = False, thread_count: int | None = None
    ) -> Table[TensorStatistics]:
        """Return what the values of each tensor are like.

        Those that a save with ``statistics=True`` stored are taken as they are; all other tensors
        are read, in bounded memory.

        Parameters
        ----------
        stored
            Turn off to read every tensor.
        progress
            Show on standard error how many tensors are done, where that is a terminal.
        thread_count
            Worker threads; by default this process' share of the cores.

        Raises
        ------
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"w": torch.tensor([3.0, -4.0, float("nan")])}, "step-1.zarr")
        >>> (w,) = dcp_zarr.open_checkpoint("step-1.zarr").stats()
        >>> w.norm, w.abs_max, w.abs_max_at, w.nans
        (5.0, 4.0, (1,), 1)
        """
        found = self.iter_stats(stored=stored, thread_count=thread_count)
        shown = tracked(found, len(self), "reading") if progress else found
        return Table(TensorStatistics, shown, self.path)

    def iter_stats(
        self, *, stored: bool = True, thread_count: int | None = None
    ) -> Iterator[TensorStatistics]:
        """Yield what the values of each tensor are like, as they are read."""
        entries, limits = list(self._entries.values()), Limits.of(thread_count)
        yield from statistics(entries, self._source, limits, stored=stored)

    def diff(
        self,
        new: Checkpoint,
        *,
        names: Callable[[str], str] = str,
        thread_count: int | None = None,
    ) -> Table[TensorDifference]:
        """Return how each tensor of this checkpoint differs in a newer one.

        Parameters
        ----------
        names
            Gives the name that an FQN of either is compared by, as where one lacks a prefix.

        Raises
        ------
        OptionError, CorruptionError
            If `new` is not open, two names would become one, or stored bytes are lost or changed.
        """
        one, two = (renamed(getattr(part, "_entries", part), names) for part in (self, new))
        found = differences(one, two, (self._source, new._source), Limits.of(thread_count))
        return Table(TensorDifference, found, f"{self.path} -> {new.path}")

    def layer_map(
        self,
        quantity: str = "std",
        older: Checkpoint | None = None,
        *,
        thread_count: int | None = None,
    ) -> Picture:
        """Draw a number of each tensor: layers are rows, kinds of tensors columns.

        Parameters
        ----------
        quantity
            ``"std"``, ``"abs_max"``, ``"zeros"`` (the share of them), ``"norm"``, or ``"drift"``:
            the norm of the change since an older checkpoint, over the norm then.
        older
            The older checkpoint; for drift.
        thread_count
            Threads that read; by default this process' share of the cores.

        Raises
        ------
        OptionError
            If there is no such quantity, or it does not go with `older`.
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> state = {f"layers.{n}.w": torch.randn(3, 4) for n in range(2)}
        >>> _ = dcp_zarr.save(state, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr").layer_map("std").save("std.svg")
        """
        layer_maps.check_quantity(quantity, compared=older is not None)
        if older is not None:
            return layer_maps.of_differences(older.diff(self, thread_count=thread_count))
        return layer_maps.of_statistics(self.iter_stats(thread_count=thread_count), quantity)

    def update_map(self, *, thread_count: int | None = None) -> Picture:
        """Draw how large Adam's last update of each parameter was, as a layer map.

        It is the root mean square of ``exp_avg / (sqrt(exp_avg_sq) + 1e-8)``: about 0.1 to 0.3
        while gradients are mostly noise, nearer to 1 the more they agree from step to step.

        Raises
        ------
        OptionError
            If there are no tensors ``X.exp_avg`` and ``X.exp_avg_sq``.
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> state = {"w.exp_avg": torch.randn(8) / 9, "w.exp_avg_sq": torch.rand(8)}
        >>> _ = dcp_zarr.save(state, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr").update_map().save("updates.svg")
        """
        found = update_sizes(self._entries, self._source, Limits.of(thread_count))
        return layer_maps.of_updates(found, self.path)

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of all tensors."""
        return sum(entry.array.nbytes for entry in self._entries.values())

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.stored_nbytes for entry in self._entries.values())

    def __getitem__(self, fqn: str) -> LazyTensor:
        """Return a tensor by its FQN; nothing is read."""
        if (entry := self._entries.get(fqn)) is not None:
            return LazyTensor(entry, self._source)
        if fqn in self._source.schema.objects:
            raise TensorNotFoundError(
                f"{fqn!r} in {self.path!r} is an object, not a tensor: use objects[{fqn!r}].",
                fqn=fqn,
            )
        raise names.not_found(fqn, [*self._entries, *self._objects], where=repr(self.path))

    def __contains__(self, fqn: object) -> bool:
        """Say whether there is a tensor of that FQN."""
        return fqn in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the FQNs of tensors, in the order of the state dict."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._entries)

    def tree(self) -> Tree:
        """Return all entries as a tree."""
        rows = listing.rows(self._schema, self._source)
        return Tree(rows, listing.title(self._schema, self.path))

    def __repr__(self) -> str:
        """Draw the first lines of the tree."""
        return str(summary_tree(self.tree()))

    def _repr_html_(self) -> str:
        """Draw the tree as HTML."""
        return self.tree()._repr_html_()

    def _ipython_key_completions_(self) -> list[str]:
        """Complete names in a notebook."""
        return list(self)

    @property
    def has_checksums(self) -> bool:
        """Whether `verify` finds bytes that changed; what others saved has no checksums here."""
        return not self._source.schema.is_foreign

    def verify(self) -> list[Damage]:
        """Check every document, index and read chunk; return what is lost or changed.

        All stored bytes are read, none are decoded. An empty list says that every byte that a
        reader would use is the one that was saved. What others saved has no checksums: its files
        are measured, not read, and an empty list says that none is cut off.
        """
        return list(damage(self._source))

    def close(self) -> None:
        """Let go of files; what was not read cannot be read any more."""
        self._source.close()

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()
