"""Opening a checkpoint: names, shapes and slices. numpy is enough; torch comes in on request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dcp_zarr import display, engine, names
from dcp_zarr.containers.directory_source import DirectorySource
from dcp_zarr.errors import OptionError, TensorNotFoundError
from dcp_zarr.region import Region, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry, TensorEntry

AxisIndex = int | slice | EllipsisType | None
Index = AxisIndex | tuple[AxisIndex, ...]

_MAX_VALUE_LENGTH = 60


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts. No process group, no torch.

    Only the root document is read.

    Parameters
    ----------
    path
        Path of a ``.zarr`` directory that dcp_zarr saved.

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
    return Checkpoint(DirectorySource(os.fspath(path)))


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

        return tensors.object_value(read_object(self._source, entry), fqn)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the FQNs."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._entries)

    def __repr__(self) -> str:
        """List the objects; nothing is read."""
        rows = (f"{fqn}: {_object_row(entry).value}" for fqn, entry in self._entries.items())
        return "\n".join(rows)


class LazyTensor:
    """A tensor in a checkpoint. Indexing reads the read chunks that it touches, and no others.

    ``tensor[...]`` gives a `torch.Tensor`, ``np.asarray(tensor)`` a numpy array without torch.
    """

    def __init__(self, entry: TensorEntry, source: Source) -> None:
        self._entry = entry
        self._source = source

    @property
    def fqn(self) -> str:
        """Fully qualified name."""
        return self._entry.fqn

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self._entry.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def torch_dtype(self) -> str:
        """Name of the torch dtype, without ``torch.``."""
        return self._entry.dtype.torch_name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the numpy array; bfloat16 and float8 are those of ml_dtypes."""
        return self._entry.dtype.stored

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes."""
        return self._entry.array.nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes as stored."""
        return self._entry.stored_nbytes

    @property
    def regions(self) -> list[Region]:
        """The regions in which the ranks saved it."""
        return list(self._entry.tiling)

    def __len__(self) -> int:
        """Return the length of the first axis."""
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part of the tensor.

        Parameters
        ----------
        index
            Integers, slices of any step, ``...`` and None, as in numpy.
        """
        from dcp_zarr import tensors  # noqa: PLC0415

        return tensors.from_bits(self._bits(index), self.torch_dtype)

    def numpy(self, index: Index = ...) -> NDArray[Any]:
        """Read a part of the tensor, without torch; complex32 gains a last axis of 2."""
        return self._entry.dtype.values(self._bits(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001
        """Read the whole tensor."""
        if copy is False:
            raise ValueError("A tensor in a checkpoint cannot be seen without a copy.")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def _bits(self, index: Index) -> NDArray[Any]:
        region, rest = _bounding_region(index, self.shape, self.fqn)
        out = np.empty(region.sizes, self._entry.dtype.bits)
        job = engine.ReadJob(self._entry.array, self._entry.codec, region, out)
        list(engine.read([job], self._source, engine.Limits.of(None)))
        return out if rest == (slice(None),) * len(rest) else np.array(out[rest], order="C")

    def row(self) -> display.Row:
        """Return what is shown of the tensor."""
        return display.Row(self.fqn, self.torch_dtype, self.shape, self.nbytes, self.stored_nbytes)

    def __repr__(self) -> str:
        """Describe the tensor; nothing is read."""
        codec = dict(self._entry.codec.configuration).get("cname", self._entry.codec.name)
        return (
            f"LazyTensor {self.fqn!r} {self.row().summary()}, {display.size(self.stored_nbytes)} "
            f"stored with {codec}, saved as {len(self._entry.tiling)} region(s)"
        )


def _bounding_region(index: Index, shape: Shape, fqn: str) -> tuple[Region, tuple[AxisIndex, ...]]:
    """Return the smallest region that holds an index, and the index within that region."""
    parts = index if isinstance(index, tuple) else (index,)
    axes_used = sum(part is not None and part is not ... for part in parts)
    if parts.count(...) > 1 or axes_used > len(shape):
        raise IndexError(f"{index!r} has too many indices for tensor {fqn!r} of shape {shape}.")
    if ... not in parts:
        parts = (*parts, ...)
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[AxisIndex] = []
    for part in parts:
        if part is None:
            rest.append(None)
        elif part is ...:
            fill = shape[len(offsets) : len(offsets) + len(shape) - axes_used]
            offsets += [0] * len(fill)
            sizes += fill
            rest += [slice(None)] * len(fill)
        else:
            start, length, within = _bounding_axis(part, shape[len(offsets)], fqn)
            offsets.append(start)
            sizes.append(length)
            rest.append(within)
    return Region(tuple(offsets), tuple(sizes)), tuple(rest)


def _bounding_axis(part: AxisIndex, length: int, fqn: str) -> tuple[int, int, int | slice]:
    """Return start and length of the smallest range that holds an index, and the index in it."""
    if isinstance(part, slice):
        positions = range(*part.indices(length))
        if not positions:
            return 0, 0, slice(None)
        low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
        return low, high - low + 1, slice(None, None, positions.step)
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise OptionError(
            f"Tensor {fqn!r} in a checkpoint takes integers, slices, ... and None, not {part!r}. "
            "Read it first: tensor[...][index]."
        )
    position = part.__index__()  # type: ignore[union-attr]
    if not -length <= position < length:
        raise IndexError(f"Index {position} is out of range for an axis of {length} of {fqn!r}.")
    return position % length, 1, 0


def read_object(source: Source, entry: ObjectEntry) -> bytes:
    """Return the bytes of an object that is stored as bytes."""
    assert entry.array is not None  # noqa: S101
    out = np.empty(entry.nbytes, np.uint8)
    region = Region((entry.offset,), (entry.nbytes,))
    job = engine.ReadJob(entry.array, source.schema.objects_codec, region, out)
    list(engine.read([job], source, engine.Limits(1)))
    return out.tobytes()


def select_entries(source: Source, pattern: str) -> Sequence[str]:
    """Return the FQNs of tensors and objects that a pattern selects.

    Raises
    ------
    TensorNotFoundError
        If it selects none.
    """
    fqns = [entry.fqn for entry in source.schema.entries]
    return names.select(pattern, fqns, where=repr(source.where))
