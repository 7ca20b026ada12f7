"""A report of a checkpoint: one page of tables and pictures. numpy is enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import layer_maps
from dcp_zarr.display import count, number_in, size
from dcp_zarr.histogram import histogram
from dcp_zarr.local_files import page_target, write_page
from dcp_zarr.moments import owners
from dcp_zarr.opening import opened
from dcp_zarr.pictures.page import Section, collapsed, page, paragraph, side_by_side, table
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.checkpoint import Checkpoint
    from dcp_zarr.comparison import TensorDifference
    from dcp_zarr.lazy_tensor import LazyTensor
    from dcp_zarr.tensor_statistics import TensorStatistics

Tracked = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Passes items on and shows how far they have come; gets their number, and what is done."""

_BLOCK_BYTES = 8 << 20
_BINS = 80
_HISTOGRAMS = 6
_SHOWN_ROWS = 8
_LARGEST = 8
"""Among so many of the largest tensors the one with the most regions is sought."""


def report(
    checkpoint: Checkpoint | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    compared_with: Checkpoint | str | os.PathLike[str] | None = None,
) -> None:
    """Write one page about a checkpoint that any browser shows, without any other file or host.

    It shows what there is, what the values are like, which tensors hold NaN or rows of zeros, and
    what changed since another checkpoint. All values are read, in bounded memory; no torch.

    Parameters
    ----------
    checkpoint
        The checkpoint, or its path.
    output
        Where to write; ends in ``.html``. A file that stands there is replaced, in one act.
    compared_with
        An older checkpoint, or its path.

    Raises
    ------
    OptionError
        If `output` cannot be such a file; nothing is read then.
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If a checkpoint cannot be read.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> _ = dcp_zarr.save({"layers": [torch.randn(8, 4), torch.randn(8, 4)]}, "step-1.zarr")
    >>> dcp_zarr.report("step-1.zarr", "report.html")
    """
    write_report(checkpoint, output, compared_with, tracked=lambda items, _, __: items)


def write_report(
    checkpoint: Checkpoint | str | os.PathLike[str],
    output: str | os.PathLike[str],
    compared_with: Checkpoint | str | os.PathLike[str] | None,
    *,
    tracked: Tracked,
) -> None:
    """Write a report as `report` does, and show how far it has come."""
    target = page_target(output, (".html",))
    with ExitStack() as stack:
        one = stack.enter_context(opened(checkpoint))
        older = None if compared_with is None else stack.enter_context(opened(compared_with))
        statistics = list(tracked(one.iter_stats(), len(one), "reading values"))
        contents = _Contents(one, older, statistics)
        parts = list(contents.parts())
        drawn = (
            Section(anchor, title, html)
            for anchor, title, draw in tracked(parts, len(parts), "drawing")
            if (html := draw())
        )
        text = page(PurePath(one.path).name, contents.notes(), contents.facts(), list(drawn))
    write_page(target, text)


@dataclass(frozen=True)
class _Contents:
    """What a report says."""

    checkpoint: Checkpoint
    older: Checkpoint | None
    statistics: list[TensorStatistics]

    def notes(self) -> Iterator[str]:
        yield self.checkpoint.path
        if self.older is not None:
            yield f"compared with {self.older.path}"

    def facts(self) -> Iterator[tuple[str, str]]:
        one = self.checkpoint
        yield f"{len(one):,}", "tensors"
        yield count(one.params), "elements"
        yield size(one.nbytes), "of values"
        share = f" ({one.stored_nbytes / one.nbytes:.0%})" if one.nbytes else ""
        yield size(one.stored_nbytes), f"stored{share}"
        yield f"{len(one.objects):,}", "objects"

    def parts(self) -> Iterator[tuple[str, str, Callable[[], str]]]:
        yield "health", "Health", self.health
        yield "totals", "Totals", self.totals
        yield "tree", "Tree", self.checkpoint._repr_html_
        yield "objects", "Objects", self.objects
        yield "layers", "Layers", self.layers
        if self.older is not None:
            yield "drift", "Changes", self.drift
        yield "updates", "Updates", self.updates
        yield "histograms", "Histograms", self.histograms
        yield "heat-map", "Heat map", self.values
        yield "regions", "Regions", self.regions

    @cached_property
    def weights(self) -> list[TensorStatistics]:
        """The tensors that are no state of Adam's, and have elements."""
        states = set(owners(self.checkpoint))
        rows = [row for row in self.statistics if row.fqn.rpartition(".")[0] not in states]
        return [row for row in rows if row.count]

    def health(self) -> str:
        found = [finding for row in self.statistics if (finding := self.finding(row))]
        if not found:
            return paragraph("No tensor holds NaN or infinity, and no matrix has rows of zeros.")
        return table(["tensor", "shape", "found"], found, 3)

    def finding(self, row: TensorStatistics) -> tuple[str, str, str] | None:
        told = [f"{row.nans:,} NaN"] if row.nans else []
        told += [f"{row.infs:,} infinite"] if row.infs else []
        is_matrix = len(row.shape) == 2 and row.shape[0] > 1  # noqa: PLR2004
        if is_matrix and row.zeros == row.count > 0:
            told.append("all values are zero")
        elif is_matrix and row.zeros >= row.shape[1] > 0:
            rows = _zero_rows(self.checkpoint[row.fqn])
            some = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", …" if rows[_SHOWN_ROWS:] else "")
            told += [f"{len(rows):,} of {row.shape[0]:,} rows are zero: {some}"] if rows else []
        return (row.fqn, str(list(row.shape)), "; ".join(told)) if told else None

    def totals(self) -> str:
        heads = ["part", "dtype", "tensors", "elements", "size", "stored"]
        rows = [
            (t.part, t.dtype, t.tensors, count(t.elements), size(t.nbytes), size(t.stored_nbytes))
            for t in self.checkpoint.totals()
        ]
        return table(heads, rows, 2)

    def objects(self) -> str:
        rows = [(r.fqn, r.value) for r in self.checkpoint.tree().rows if not r.dtype]
        return table(["object", "value"], rows, 2) if rows else ""

    def layers(self) -> str:
        first, *others = (
            layer_maps.of_statistics(self.weights, quantity)
            for quantity in ("std", "abs_max", "zeros", "norm")
        )
        return first.svg + "".join(collapsed(picture.title, picture.svg) for picture in others)

    def drift(self) -> str:
        assert self.older is not None  # noqa: S101
        rows = self.older.diff(self.checkpoint)
        differing = rows.where(lambda row: row.change != "equal")
        if not differing:
            return paragraph(f"All {len(rows)} tensors are equal, bit for bit.")
        words = f"{len(differing):,} of {len(rows):,} tensors differ."
        weights = {row.fqn for row in self.weights}
        shown = rows.where(lambda row: row.fqn in weights or row.change == "removed")
        changed = shown.where(lambda row: row.change != "equal").sorted_by("relative_norm")
        words += " Adam's state is left out below." if len(shown) < len(rows) else ""
        return paragraph(words) + layer_maps.of_differences(shown).svg + _table_of(changed)

    def updates(self) -> str:
        if not owners(self.checkpoint):
            return ""
        words = "Root mean square of exp_avg / (sqrt(exp_avg_sq) + 1e-8), for each parameter."
        return paragraph(words) + self.checkpoint.update_map().svg

    def histograms(self) -> str:
        return side_by_side(self.histogram(row) for row in _largest_of_each_kind(self.weights))

    def histogram(self, row: TensorStatistics) -> str:
        tensor = self.checkpoint[row.fqn]
        found = histogram(tensor._entry, tensor._source, _BINS, Limits.of(None), known=row)
        return found.picture().svg

    def values(self) -> str:
        worst = max(self.weights, key=lambda r: (r.nans + r.infs, r.count), default=None)
        return "" if worst is None else self.checkpoint[worst.fqn].heat_map().svg

    def regions(self) -> str:
        largest = sorted(self.weights, key=lambda row: -row.count)[:_LARGEST]
        tensors = [self.checkpoint[row.fqn] for row in largest]
        most = max(tensors, key=lambda tensor: len(tensor.regions), default=None)
        if most is None or len(most.regions) == 1:
            return ""
        words = "The regions in which ranks saved a tensor, numbered in their order."
        return paragraph(words) + most.region_map().svg


def _table_of(rows: Iterable[TensorDifference]) -> str:
    heads = ["tensor", "change", "dtype and shape", "differing", "largest", "relative", "cosine"]
    cells = [
        (
            row.fqn,
            row.change,
            " → ".join(dict.fromkeys(filter(None, [row.was, row.now]))),
            row.differing,
            row.max_abs,
            row.relative_norm,
            row.cosine,
        )
        for row in rows
    ]
    return table(heads, cells, 3)


def _largest_of_each_kind(rows: Iterable[TensorStatistics]) -> list[TensorStatistics]:
    """Return the largest tensors, one of those that differ in the numbers of layers alone."""
    kinds: dict[str, TensorStatistics] = {}
    for row in rows:
        is_layer = (number_in(segment) is not None for segment in row.fqn.split("."))
        kind = ".".join(
            "*" if number else segment
            for number, segment in zip(is_layer, row.fqn.split("."), strict=True)
        )
        kinds.setdefault(kind, row)
    real = [r for r in kinds.values() if "complex" not in r.dtype and r.min == r.min]
    return sorted(real, key=lambda row: -row.count)[:_HISTOGRAMS]


def _blocks(tensor: LazyTensor) -> Iterator[NDArray[Any]]:
    """Read some rows at a time."""
    if not tensor.shape:
        yield tensor.numpy()
        return
    at_once = max(_BLOCK_BYTES * len(tensor) // max(tensor.nbytes, 1), 1)
    for start in range(0, len(tensor), at_once):
        yield tensor.numpy(slice(start, start + at_once))


def _zero_rows(tensor: LazyTensor) -> list[int]:
    has_values = [(block != 0).any(axis=tuple(range(1, block.ndim))) for block in _blocks(tensor)]
    return [int(row) for row in np.flatnonzero(~np.concatenate(has_values))]
