"""A checkpoint that others saved, as a source: tensors gathered from where their parts lie.

Each tensor has one write chunk. It is cut into read chunks of whole rows, uncompressed and
without checksums, which are put together from the regions they touch when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import NONE
from dcp_zarr.container import Extent
from dcp_zarr.containers.foreign.strided import c_strides
from dcp_zarr.dtypes import bits_dtype, dtype_of
from dcp_zarr.errors import CorruptionError, DcpZarrError, LayoutError, UnsupportedTensorError
from dcp_zarr.layout import ArrayLayout, enclosing
from dcp_zarr.region import Region, Tiling
from dcp_zarr.schema import Schema, TensorEntry

if TYPE_CHECKING:
    from dcp_zarr.canonical_json import Json
    from dcp_zarr.containers.foreign.strided import Strided
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import Entry, Keys

_READ_CHUNK_BYTES = 1 << 20
_TRANSPOSED_BYTES = 64 << 20
"""Read chunk of a tensor that does not lie in C order: each touches most of its pages."""

Place = Callable[[], "Strided"]
Placed = tuple["Entry", Sequence[Place]]
"""A tensor, and what gives the place of each of its regions; or an object, and of its bytes."""


def placed_tensor(
    fqn: str,
    torch_dtype: str,
    shape: Shape,
    parts: Sequence[tuple[Region, Place]],
    *,
    is_contiguous: bool = True,
    properties: Mapping[str, Json] | None = None,
) -> Placed:
    """Describe a tensor of which the places of some regions are known.

    Parameters
    ----------
    fqn
        Its name.
    torch_dtype
        Name of its dtype.
    shape
        Its shape.
    parts
        The regions, which cover it, and what gives the place of each.
    is_contiguous
        Whether its elements lie in C order.
    properties
        As in the schema.

    Raises
    ------
    UnsupportedTensorError
        If there is no such dtype, or no numpy array is that large.
    CorruptionError
        If they do not cover it.
    """
    dtype = dtype_of(torch_dtype, fqn=fqn)
    if prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} is said to be {list(shape)}, more than any machine holds.", fqn=fqn
        )
    tiling = Tiling.of(shape, [region for region, _ in parts])
    try:
        tiling.check(fqn)
    except LayoutError as error:
        raise CorruptionError(f"Tensor {fqn!r} is not whole: {error}", fqn=fqn) from error
    nbytes = _READ_CHUNK_BYTES if is_contiguous else _TRANSPOSED_BYTES
    read = _rows(shape, max(nbytes // dtype.itemsize, 1))
    array = ArrayLayout(
        fqn, fqn, shape, dtype.itemsize, read, enclosing(shape, read), dtype.trailing
    )
    entry = TensorEntry(array, dtype, NONE, tiling, properties or {}, array.nbytes)
    return entry, [place for _, place in parts]


def _rows(shape: Shape, elements: int) -> Shape:
    """Return the shape of a box of so many elements at most that C order leaves in one piece."""
    sizes: list[int] = []
    for length in reversed(shape):
        sizes.insert(0, max(min(length, elements), 1))
        elements = elements // length if length and elements >= length else 1
    return tuple(sizes)


class ForeignSource:
    """A checkpoint in files of another format.

    Parameters
    ----------
    where
        Its path, for messages.
    entries
        Tensors and objects by FQN, in order, and where they lie.
    documents
        Files that describe it, as they were when they were read.
    planner_data, metadata_version, shared, keys_as_text
        As in `Schema`.
    """

    network_calls = 0

    def __init__(
        self,
        where: str,
        entries: Mapping[str, Placed],
        *,
        documents: Mapping[str, os.stat_result],
        planner_data: Mapping[str, Keys] | None = None,
        metadata_version: str | None = None,
        shared: tuple[tuple[str, ...], ...] = (),
        keys_as_text: tuple[str, ...] = (),
    ) -> None:
        self._where = where
        self._places = {fqn: places for fqn, (_, places) in entries.items()}
        self._documents = list(documents)
        self._seen = {path: _identity(status) for path, status in documents.items()}
        self._is_open = True
        self._schema = Schema(
            entries=tuple(entry for entry, _ in entries.values()),
            save_id=" ".join(f"{s.st_size}-{s.st_mtime_ns}" for s in documents.values()),
            objects_codec=NONE,
            planner_data=planner_data,
            metadata_version=metadata_version,
            is_foreign=True,
            shared=shared,
            keys_as_text=keys_as_text,
        )

    @property
    def where(self) -> str:
        """Path of the checkpoint."""
        return self._where

    @property
    def schema(self) -> Schema:
        """What is in it, in our words."""
        return self._schema

    def places(self, fqn: str) -> list[Strided]:
        """Return where the regions of a tensor lie, in the order of its tiling."""
        return [place() for place in self._places[fqn]]

    def damaged_documents(self) -> Iterator[str]:
        """Describe what is missing; these formats have no checksums."""
        for fqn, places in self._places.items():
            for place in places:
                try:
                    found = place()
                    if found.start + found.span > os.stat(found.path).st_size:
                        yield f"{fqn}: {found.path!r} ends before byte {found.start + found.span}."
                except (DcpZarrError, OSError) as error:
                    yield f"{fqn}: {error}"

    @contextmanager
    def open_object(self, array: ArrayLayout, write_chunk: Shape) -> Iterator[_Gathered]:
        """Open a tensor; its files are opened when they are read."""
        if not self._is_open:
            raise DcpZarrError(f"{self._where!r} was closed; open it again.", path=self._where)
        for path in self._documents:
            self._check_same(path, os.stat(path))
        entry = self._schema.tensors.get(array.fqn)
        tiling = entry.tiling if entry else Tiling.of(array.shape, [Region.whole(array.shape)])
        with ExitStack() as stack:
            yield _Gathered(array, tiling, self._places[array.fqn], self._opener(stack))

    def _opener(self, stack: ExitStack) -> Callable[[str], int]:
        opened: dict[str, int] = {}

        def opener(path: str) -> int:
            if path not in opened:
                opened[path] = fd = os.open(path, os.O_RDONLY)
                stack.callback(os.close, fd)
                self._check_same(path, os.fstat(fd))
            return opened[path]

        return opener

    def _check_same(self, path: str, status: os.stat_result) -> None:
        """Raise where a file is not the one that was seen first."""
        found = _identity(status)
        if self._seen.setdefault(path, found) != found:
            raise CorruptionError(f"{path!r} was replaced after it was opened; open it again.")

    def check_unchanged(self) -> None:
        """Do nothing: each file is looked at as it is opened."""

    def close(self) -> None:
        """Let nothing more be read."""
        self._is_open = False


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A tensor as one object: its read chunks, padded, one after the other."""

    array: ArrayLayout
    tiling: Tiling
    places: Sequence[Place]
    opener: Callable[[str], int]

    def extents(self, read_chunks: Sequence[Shape]) -> list[Extent]:
        """Return where read chunks lie."""
        steps, nbytes = c_strides(self.array.read_grid.counts), self.array.read_chunk_nbytes
        numbers = (sum(map(mul, read_chunk, steps)) for read_chunk in read_chunks)
        return [Extent(number * nbytes, nbytes, is_checked=False) for number in numbers]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, each of whole read chunks, from the files."""
        array = self.array
        dtype, nbytes = bits_dtype(array.itemsize), array.read_chunk_nbytes
        counts = array.read_grid.counts
        number = offset // nbytes
        for buffer in buffers:
            for start in range(0, len(buffer), nbytes):
                both = zip(c_strides(counts), counts, strict=True)
                read_chunk = tuple(number // step % count for step, count in both)
                out = np.frombuffer(buffer[start : start + nbytes], dtype)
                self._fill(read_chunk, out.reshape(array.read_chunk_shape))
                number += 1

    def _fill(self, read_chunk: Shape, out: Any) -> None:  # noqa: ANN401
        """Gather a read chunk; what overhangs the tensor is left as it is."""
        box = self.array.read_grid.box(read_chunk)
        for number in self._touched(box):
            region = Region(
                *(tuple(c[number].tolist()) for c in (self.tiling.offsets, self.tiling.sizes))
            )
            part = box.intersection(region)
            place = self.places[number]().part(
                Region(
                    tuple(p - r for p, r in zip(part.offsets, region.offsets, strict=True)),
                    part.sizes,
                )
            )
            place.read(self.opener(place.path), out[part.index(box.offsets)])

    def _touched(self, box: Region) -> list[int]:
        """Return the regions that share elements with a box."""
        offsets, ends = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
        begins = np.maximum(self.tiling.offsets, offsets)
        shared = (begins < np.minimum(self.tiling.ends, ends)).all(axis=1)
        return [int(number) for number in np.flatnonzero(shared)]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
