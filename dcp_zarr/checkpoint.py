"""Opening a checkpoint: names, shapes and slices. numpy is enough; torch comes in on request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Self

from dcp_zarr import display, engine, names
from dcp_zarr.containers.by_path import open_source
from dcp_zarr.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    TensorNotFoundError,
)
from dcp_zarr.lazy_tensor import LazyTensor
from dcp_zarr.local_files import local_path
from dcp_zarr.objects import read_objects
from dcp_zarr.region import Region, coordinates
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry

_MAX_VALUE_LENGTH = 60


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts. No process group, no torch.

    Only the schema is read.

    Parameters
    ----------
    path
        Path of what dcp_zarr saved: a ``.zarr`` directory, a zip file or an HDF5 file.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, FormatError, CorruptionError
        If there is none that can be read.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> _ = dcp_zarr.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, "step-1.zarr")
    >>> checkpoint = dcp_zarr.open_checkpoint("step-1.zarr")
    >>> checkpoint["model.w"][1]
    tensor([3., 4., 5.])
    """
    return Checkpoint(open_source(local_path(path)))


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a checkpoint that is not as it was saved."""

    fqn: str | None
    """The tensor whose values are concerned; None for a document."""
    region: Region | None
    """Where in that tensor."""
    message: str
    """What is wrong."""

    def __str__(self) -> str:
        """Describe the damage in a line."""
        return self.message if self.fqn is None else f"{self.fqn} {self.region}: {self.message}"


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Say whether a committed checkpoint stands at a path; its values are not read.

    Raises
    ------
    CorruptionError, FormatError
        If something stands there that is no whole checkpoint of a version that can be read.

    Examples
    --------
    >>> is_complete("step-999.zarr")
    False
    """
    try:
        open_checkpoint(path).close()
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


class Checkpoint(Mapping[str, "LazyTensor"]):
    """A committed checkpoint: a mapping from the FQNs of its tensors to lazy tensors.

    Entries that are not tensors are in `objects`. May be used from several threads.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._entries = source.schema.tensors

    @property
    def path(self) -> str:
        """Where the checkpoint is."""
        return self._source.where

    @property
    def objects(self) -> Mapping[str, Any]:
        """What is not a tensor, by FQN; values are read when asked for."""
        return Objects(self._source)

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
        raise names.not_found(fqn, self._entries, where=repr(self.path))

    def __contains__(self, fqn: object) -> bool:
        """Say whether there is a tensor of that FQN."""
        return fqn in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the FQNs of tensors, in the order of the state dict."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._entries)

    def tree(self) -> display.Tree:
        """Return all entries as a tree."""
        return display.Tree(self._rows(), self._title())

    def __repr__(self) -> str:
        """Draw the first lines of the tree."""
        return str(display.summary_tree(self._rows(), self._title()))

    def _repr_html_(self) -> str:
        """Draw the tree as HTML."""
        return self.tree()._repr_html_()

    def _ipython_key_completions_(self) -> list[str]:
        """Complete names in a notebook."""
        return list(self)

    def _title(self) -> str:
        elements = sum(prod(entry.array.shape) for entry in self._entries.values())
        return (
            f"Checkpoint {self.path}: {len(self)} tensors, {display.count(elements)} elements, "
            f"{display.size(self.nbytes)} ({display.size(self.stored_nbytes)} stored)"
        )

    def _rows(self) -> list[display.Row]:
        return [
            LazyTensor(self._entries[entry.fqn], self._source).row()
            if entry.fqn in self._entries
            else _object_row(self._source.schema.objects[entry.fqn])
            for entry in self._source.schema.entries
        ]

    def verify(self) -> list[Damage]:
        """Check every document, index and read chunk; return what is lost or changed.

        All stored bytes are read, none are decoded. An empty list says that every byte that a
        reader would use is the one that was saved.
        """
        schema = self._source.schema
        jobs = [
            engine.CheckJob(array, write_chunk)
            for array, _, _ in schema.arrays()
            for write_chunk in coordinates(array.write_grid.touched(Region.whole(array.shape)))
        ]
        found = [Damage(None, None, text) for text in self._source.damaged_documents()]
        for job, error in engine.check(jobs, self._source, Limits.of(None)):
            region = job.array.write_grid.box(job.write_chunk)
            found.append(Damage(job.array.fqn, region, str(error)))
        return found

    def close(self) -> None:
        """Let go of files; what was not read cannot be read any more."""
        self._source.close()

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()


def _object_row(entry: ObjectEntry) -> display.Row:
    text = repr(entry.json[0]) if entry.json else f"object, {display.size(entry.nbytes)}"
    if len(text) > _MAX_VALUE_LENGTH:
        text = text[: _MAX_VALUE_LENGTH - 1] + "…"
    return display.Row(entry.fqn, "", (), 0, entry.nbytes, text)


class Objects(Mapping[str, Any]):
    """The entries of a checkpoint that are not tensors.

    Values that JSON holds exactly come without torch. Others are unpickled by torch with
    ``weights_only=True``, which runs no code and refuses what would.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._entries = source.schema.objects

    def __getitem__(self, fqn: str) -> Any:  # noqa: ANN401
        """Return an object by its FQN."""
        if (entry := self._entries.get(fqn)) is None:
            raise names.not_found(fqn, self._entries, where=f"objects of {self._source.where!r}")
        if entry.json:
            return entry.json[0]
        from dcp_zarr import tensors  # noqa: PLC0415

        ((_, payload),) = read_objects(self._source, [entry])
        return tensors.object_value(payload, fqn)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the FQNs."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._entries)

    def __repr__(self) -> str:
        """List the objects; nothing is read."""
        named = ((display.printable(fqn), entry) for fqn, entry in self._entries.items())
        rows = (f"{name}: {_object_row(entry).value}" for name, entry in named)
        return "\n".join(rows)


def select_entries(source: Source, pattern: str) -> Sequence[str]:
    """Return the FQNs of tensors and objects that a pattern selects.

    Raises
    ------
    TensorNotFoundError
        If it selects none.
    """
    fqns = [entry.fqn for entry in source.schema.entries]
    return names.select(pattern, fqns, where=repr(source.where))
