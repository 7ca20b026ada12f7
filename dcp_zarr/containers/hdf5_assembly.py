"""Makes an HDF5 file of the read chunks that ranks left in one, and of the schema.

In place: libhdf5 makes groups, data sets and indexes in memory, as if it had written the read
chunks where they lie (`hdf5_build`); what it made is written around them. Where it would have them
elsewhere, they are copied into a new file, one by one, without being compressed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from h5py import h5d, h5f, h5s, h5t

from dcp_zarr.containers import hdf5_format
from dcp_zarr.containers.gaps import read_placed
from dcp_zarr.containers.hdf5_build import GAP_BYTES, Build, SparseFile
from dcp_zarr.errors import DcpZarrError, SaveError
from dcp_zarr.layout import enclosing
from dcp_zarr.local_files import write_all
from dcp_zarr.schema import TensorEntry
from dcp_zarr.schema_json import schema_to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.container import Buffer
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.schema import Entry, Schema


_NOWHERE = 1 << 62


class MisplacedError(DcpZarrError):
    """libhdf5 puts read chunks elsewhere than where they lie."""


@dataclass(frozen=True)
class Contents:
    """What a file is made of."""

    schema: Schema
    """All tensors and objects."""
    placed: NDArray[np.int64]
    """The tensors' read chunks in the order of their addresses; in rows the number of the tensor,
    the place in its grid in C order, offset, size and crc32c."""
    objects: Mapping[int, tuple[Buffer, int]]
    """The stored read chunks of the array of objects, by number: bytes and crc32c."""

    @cached_property
    def tensors(self) -> list[TensorEntry]:
        """The tensors, in the order of their numbers."""
        return list(self.schema.tensors.values())

    @property
    def has_tiny_read_chunks(self) -> bool:
        """Whether the first read chunk of several is as small as what stands for it before."""
        several = [hdf5_format.read_chunk_count(entry.array) > 1 for entry in self.tensors]
        tiny = self.placed[(self.placed[:, 1] == 0) & (self.placed[:, 3] == 1), 0]
        return any(several[number] for number in tiny.tolist())

    @cached_property
    def texts(self) -> list[bytes]:
        """Their descriptions."""
        return list(map(hdf5_format.description, self.tensors))


def in_place(fd: int, contents: Contents) -> None:
    """Make a file of the one in which the read chunks lie.

    Raises
    ------
    MisplacedError
        If libhdf5 would have them elsewhere; nothing was written then.
    """
    placed = contents.placed
    first = int(placed[0, 2]) if len(placed) else 0
    end = int(placed[-1, 2:4].sum()) if len(placed) else _NOWHERE
    if contents.has_tiny_read_chunks:
        raise MisplacedError("A read chunk of several is one byte.")
    file = SparseFile(end, end)
    with _building(file, contents, in_place=True) as build:
        starts, sizes = placed[:, 2], placed[:, 3]
        between = starts[1:] - starts[:-1] - sizes[:-1]
        # Before the first read chunk there is what libhdf5 is about to make.
        steps = int((-(-between // GAP_BYTES)).sum()) + -(-first // GAP_BYTES) + 1
        single_bytes = bool((sizes == 1).any() or (between == 1).any())
        build.add_gaps(steps, single_bytes=single_bytes)
        h5f.flush(build.file)
        file.start = build.file.get_filesize() if len(placed) else end
        # A gap of one byte would go where the first byte of an index was.
        if len(placed) and (first < file.start or first - file.start == 1):
            raise MisplacedError(f"libhdf5 needs {file.start} bytes in front of byte {first}.")
        nothing = np.zeros(int(sizes.max(initial=0)), np.uint8).data
        gaps = [first - file.start, *between.tolist()] if len(placed) else []
        build.put(placed[:, :4].tolist(), gaps, lambda _, nbytes: nothing[:nbytes])
        lying = _lying(build, contents)
        if not np.array_equal(lying, _expected(placed)):
            raise MisplacedError("libhdf5 did not allocate at the end of the file.")
        _append(build, contents, lying)
        build.remove_gaps()
    if file.passed != (end - file.start if len(placed) else 0):
        raise MisplacedError("libhdf5 wrote something else among the read chunks.")
    _write_around(fd, file)


def _write_around(fd: int, file: SparseFile) -> None:
    """Write what libhdf5 made around the read chunks; the signature last."""
    head, behind = memoryview(file.head), hdf5_format.SIGNATURE_BYTES
    if file.tail:
        write_all(fd, file.end, [memoryview(file.tail)])
    write_all(fd, behind, [head[behind:]])
    os.ftruncate(fd, max(file.size, file.end + len(file.tail) if file.tail else len(head)))
    write_all(fd, 0, [head[:behind]])


def copied(fd: int, path: str | os.PathLike[str], contents: Contents) -> None:
    """Make a new file at a path, and copy the read chunks into it from the one they lie in."""
    with open(path, "x+b", buffering=0) as file, _building(file, contents, in_place=False) as build:
        placed: list[Any] = contents.placed[:, :4].tolist()
        build.put(placed, [0] * len(placed), partial(read_placed, fd))
        _append(build, contents, _lying(build, contents))


@contextmanager
def _building(file: Any, contents: Contents, *, in_place: bool) -> Iterator[Build]:  # noqa: ANN401
    """Give a new file with the data sets of all tensors; close it in the end."""
    build = Build(hdf5_format.new_file(file), in_place)
    try:
        for entry, text in zip(contents.tensors, contents.texts, strict=True):
            build.add_tensor(entry, text)
        yield build
        h5f.flush(build.file)
    finally:
        build.close()


def _expected(placed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return offset, size and crc32c of read chunks, by tensor and in C order."""
    return placed[np.lexsort((placed[:, 1], placed[:, 0]))][:, 2:5]


def _lying(build: Build, contents: Contents) -> NDArray[np.int64]:
    """Return offset and size, as libhdf5 has them, and crc32c of all read chunks.

    Raises
    ------
    SaveError
        If a read chunk's filters are not as they were written.
    """
    found: list[list[int]] = []
    for number, entry in enumerate(contents.tensors):
        for offset, nbytes, mask in build.lying(number):
            found.append([offset, nbytes])
            if mask != hdf5_format.filter_mask(entry.array, entry.codec, nbytes):
                raise SaveError(f"A chunk of {entry.array.path!r} has the filter mask {mask}.")
    crcs = _expected(contents.placed)[:, 2:]
    return np.concatenate([np.array(found, np.int64).reshape(-1, 2), crcs], axis=1)


def _append(build: Build, contents: Contents, lying: NDArray[np.int64]) -> None:
    """Add what depends on values: objects, checksums and, last, the schema."""
    schema = _one_object_each(contents.schema)
    arrays = {array.path: array for array, _, _ in schema.arrays()}
    tensors = {entry.array.path for entry in contents.tensors}
    starts = np.cumsum([0, *(hdf5_format.read_chunk_count(e.array) for e in contents.tensors)])
    rows = {
        entry.array.path: lying[start:end]
        for entry, start, end in zip(contents.tensors, starts, starts[1:], strict=False)
    }
    for path in arrays.keys() - tensors:
        rows[path] = _append_objects(build, arrays[path], schema.objects_codec, contents.objects)
    table = np.concatenate([np.empty((0, 3), np.int64), *(rows[path] for path in arrays)])
    _append_table(build, table.astype("<u8"))
    texts = dict(zip((entry.array.path for entry in contents.tensors), contents.texts, strict=True))
    documents = {path: hdf5_format.digest(texts.get(path)) for path in arrays}
    described = schema_to_json(replace(schema, documents=documents))
    hdf5_format.create_text(build.file, hdf5_format.SCHEMA, hdf5_format.json_text(described))
    told = {key: described[key] for key in ("format_version", "save_id")}
    hdf5_format.set_attribute(
        build.file, hdf5_format.json_text({**told, "schema": hdf5_format.SCHEMA})
    )


def _append_objects(
    build: Build, array: ArrayLayout, codec: Codec, stored: Mapping[int, tuple[Buffer, int]]
) -> NDArray[np.int64]:
    """Add the array of objects; return offset, size and crc32c of its read chunks."""
    number = build.add(array, codec, h5t.STD_U8LE, None)
    placed = [(number, position, position, len(stored[position][0])) for position in sorted(stored)]
    build.put(placed, [0] * len(placed), lambda position, _: stored[position][0])
    crcs = np.array([stored[position][1] for position in sorted(stored)], np.int64)
    lying = np.array(build.lying(number), np.int64).reshape(-1, 3)
    return np.column_stack([lying[:, :2], crcs])


def _append_table(build: Build, table: NDArray[np.uint64]) -> None:
    """Add the table of all read chunks."""
    space = h5s.create_simple(table.shape)
    created = h5d.create(build.file, hdf5_format.READ_CHUNKS.encode(), h5t.STD_U64LE, space)
    if table.size:
        created.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(table))
    claims = {"sha256": hdf5_format.table_digest(table), "offset": created.get_offset() or 0}
    hdf5_format.set_attribute(created, hdf5_format.json_text(claims))


def _one_object_each(schema: Schema) -> Schema:
    """Return a schema in which each array is one object: read chunks are stored one by one."""

    def whole(array: ArrayLayout) -> ArrayLayout:
        return replace(array, write_chunk_shape=enclosing(array.shape, array.read_chunk_shape))

    def entry(old: Entry) -> Entry:
        if isinstance(old, TensorEntry):
            return replace(old, array=whole(old.array))
        return old if old.array is None else replace(old, array=whole(old.array))

    return replace(schema, entries=tuple(map(entry, schema.entries)))
