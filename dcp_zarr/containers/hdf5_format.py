"""What dcp_zarr's tensors are in HDF5: types, filters, attributes; no I/O of its own.

Sources: the HDF5 File Format Specification 3.0 and the HDF5 1.10 reference manual; filters by the
HDF Group's registry (32001 Blosc, 32015 Zstandard).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5p, h5s, h5t, h5z

from dcp_zarr import names
from dcp_zarr.codecs import SHUFFLE_ZLIB
from dcp_zarr.dtypes import EXTENSION_TYPES
from dcp_zarr.schema_json import properties_to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from dcp_zarr.codecs import Codec
    from dcp_zarr.dtypes import DType
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import TensorEntry

SIGNATURE_BYTES = 8
"""Size of what an HDF5 file begins with."""
ATTRIBUTE = b"dcp_zarr"
"""Name of our attribute: of the root, whose schema it is; of a data set, what it holds."""
SCHEMA = "~_schema"
"""Path of the data set that is the schema: one text. An attribute of more than 64 KiB has no
checksum, and h5repack 1.10 refuses it."""
READ_CHUNKS = "~_read_chunks"
"""Path of the dataset that tells offset, size and crc32c of each stored read chunk."""
MAX_AXES = 32
"""HDF5 knows no more."""

_BLOSC, _ZSTD = 32001, 32015
_BLOSC_FILTER_VERSION, _BLOSC_FORMAT_VERSION = 2, 2
_BLOSC_COMPRESSORS = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")


def stored_type(dtype: DType) -> Any:  # noqa: ANN401
    """Return the type of a tensor's elements in the file.

    bfloat16 and float8_e5m2 are floats that any HDF5 library converts; their predefined types of
    HDF5 2.0 are equal to these. The other float8 kinds have values that no such float has, and are
    unsigned bytes.
    """
    return _stored_type(dtype.data_type, dtype.stored, is_complex32=bool(dtype.trailing))


@lru_cache(maxsize=64)
def _stored_type(data_type: str, stored: np.dtype[Any], *, is_complex32: bool) -> Any:  # noqa: ANN401
    if data_type == "bfloat16":
        return _float(2, exponent_bits=8, mantissa_bits=7, bias=127)
    if data_type == "float8_e5m2":
        return _float(1, exponent_bits=5, mantissa_bits=2, bias=15)
    if data_type in EXTENSION_TYPES:
        return h5t.STD_U8LE
    if is_complex32:
        return h5t.py_create(np.dtype([("r", "<f2"), ("i", "<f2")]), logical=True)
    return h5t.py_create(stored.newbyteorder("<"), logical=True)


def _float(nbytes: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> Any:  # noqa: ANN401
    """Return a float type: sign, exponent and mantissa, from the highest bit down."""
    made = h5t.IEEE_F32LE.copy()
    made.set_fields(8 * nbytes - 1, mantissa_bits, exponent_bits, 0, mantissa_bits)
    made.set_size(nbytes)
    made.set_ebias(bias)
    return made


def creation(array: ArrayLayout, codec: Codec) -> Any:  # noqa: ANN401
    """Return how an array's data set is created: its chunks and filters.

    One without axes, or without elements, is contiguous.
    """
    if not array.shape or not prod(array.shape):
        return _contiguous()
    several = read_chunk_count(array) > 1
    return _in_read_chunks(array.read_chunk_shape, codec, array.read_chunk_nbytes, several=several)


@lru_cache(maxsize=1)
def _contiguous() -> Any:  # noqa: ANN401
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_layout(h5d.CONTIGUOUS)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    made.set_alloc_time(h5d.ALLOC_TIME_LATE)
    return made


@lru_cache(maxsize=4096)
def _in_read_chunks(
    read_chunk_shape: Shape, codec: Codec, read_chunk_nbytes: int, *, several: bool
) -> Any:  # noqa: ANN401
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_chunk(read_chunk_shape)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    configuration = dict(codec.configuration)
    if codec.name == "none" and several:
        # All chunks skip it. Without a filter, libhdf5 would make the index when it is too late.
        made.set_deflate(1)
    elif codec.name == SHUFFLE_ZLIB:
        if configuration["elementsize"] > 1:
            made.set_shuffle()
        made.set_deflate(configuration["level"])
    elif codec.name == "blosc":
        values = (
            _BLOSC_FILTER_VERSION,
            _BLOSC_FORMAT_VERSION,
            configuration["typesize"],
            read_chunk_nbytes,
            configuration["clevel"],
            _BLOSC_SHUFFLES.index(configuration["shuffle"]),
            _BLOSC_COMPRESSORS.index(configuration["cname"]),
        )
        made.set_filter(_BLOSC, h5z.FLAG_OPTIONAL, values)
    elif codec.name == "zstd":
        made.set_filter(_ZSTD, h5z.FLAG_OPTIONAL, (max(configuration["level"], 1),))
    return made


def filter_mask(array: ArrayLayout, codec: Codec, nbytes: int) -> int:
    """Return which filters a stored read chunk of a size did not pass: all, or none."""
    if codec.name == "none":
        return 0b1 if read_chunk_count(array) > 1 else 0
    if codec.name != SHUFFLE_ZLIB or nbytes != array.read_chunk_nbytes:
        return 0
    return 0b11 if dict(codec.configuration)["elementsize"] > 1 else 0b1


def new_file(content: Any) -> Any:  # noqa: ANN401
    """Create a file that HDF5 1.10 and newer read.

    Parameters
    ----------
    content
        Where it goes: an object like a binary file.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_sieve_buf_size(0)
    access.set_cache(0, 1, 0, 0.0)  # nothing is read through chunk caches, and each takes memory
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, content)
    return h5f.create(b"dcp_zarr", h5f.ACC_TRUNC, fapl=access)


@contextmanager
def opened(content: Any) -> Iterator[Any]:  # noqa: ANN401
    """Open a file for reading, and close it; where it is, is an object like a binary file."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, content)
    file = h5f.open(b"dcp_zarr", h5f.ACC_RDONLY, fapl=access)
    try:
        yield file
    finally:
        file.close()


@lru_cache(maxsize=4096)
def _text_type(nbytes: int) -> Any:  # noqa: ANN401
    made = h5t.C_S1.copy()
    made.set_size(nbytes)
    made.set_strpad(h5t.STR_NULLPAD)
    made.set_cset(h5t.CSET_UTF8)
    return made


def set_attribute(owner: Any, text: bytes) -> None:  # noqa: ANN401
    """Give an object our attribute: one text of fixed length, UTF-8."""
    kind = _text_type(len(text))
    attribute = h5a.create(owner, ATTRIBUTE, kind, h5s.create(h5s.SCALAR))
    attribute.write(np.frombuffer(text, f"S{len(text)}").reshape(()), mtype=kind)


def attribute(owner: Any) -> bytes | None:  # noqa: ANN401
    """Return our attribute of an object, or None."""
    if not h5a.exists(owner, ATTRIBUTE):
        return None
    found = h5a.open(owner, ATTRIBUTE)
    kind = found.get_type()
    if found.shape != () or kind != _text_type(kind.get_size()):
        return None
    text = np.empty((), f"S{kind.get_size()}")
    found.read(text, mtype=kind)
    return text.tobytes()


def create_text(file: Any, path: str, text: bytes) -> None:  # noqa: ANN401
    """Create a data set that is one text of fixed length, UTF-8."""
    kind = _text_type(len(text))
    created = h5d.create(file, path.encode(), kind, h5s.create(h5s.SCALAR))
    created.write(h5s.ALL, h5s.ALL, np.frombuffer(text, f"S{len(text)}").reshape(()), mtype=kind)


def read_text(file: Any, path: str, file_nbytes: int) -> bytes:  # noqa: ANN401
    """Return a data set that is one text.

    Raises
    ------
    ValueError
        If it is none, or longer than the file.
    """
    found = h5d.open(file, path.encode())
    kind = found.get_type()
    if found.shape != () or kind != _text_type(kind.get_size()) or kind.get_size() > file_nbytes:
        raise ValueError(f"{path} is not one text")
    text = np.empty((), f"S{kind.get_size()}")
    found.read(h5s.ALL, h5s.ALL, text, mtype=kind)
    return text.tobytes()


def description(entry: TensorEntry) -> bytes:
    """Return what a data set's attribute says of its tensor, as JSON.

    What would make it too long for the data set's header stands in the schema alone.
    """
    described = properties_to_json(entry)
    for member in ("tiling", "fqn"):
        text = json_text(described)
        if len(text) <= _LONGEST_ATTRIBUTE_BYTES:
            break
        del described[member]
    return json_text(described)


def digest(text: bytes | None) -> str:
    """Return the SHA-256 of an attribute in hex; of none, that of no bytes."""
    return hashlib.sha256(text or b"").hexdigest()


def read_chunk_count(array: ArrayLayout) -> int:
    """Return how many read chunks an array has."""
    return prod(array.read_grid.counts)


def places(array: ArrayLayout, read_chunks: Sequence[Shape]) -> NDArray[np.int64]:
    """Return the places of read chunks in their array's grid, in C order."""
    if not array.shape:
        return np.zeros(len(read_chunks), np.int64)
    axes = tuple(np.array(read_chunks, np.int64).T)
    return np.asarray(np.ravel_multi_index(axes, array.read_grid.counts), np.int64)


def json_text(value: Any) -> bytes:  # noqa: ANN401
    """Return JSON as it stands in attributes."""
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def table_digest(table: NDArray[np.uint64]) -> str:
    """Return the SHA-256 of the table of read chunks, in hex."""
    return hashlib.sha256(table.tobytes()).hexdigest()


def table_claims(table: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what the attribute of the table's data set says: its digest, and where it lies.

    Raises
    ------
    ValueError
        If it says nothing of the kind.
    """
    claims = json.loads(attribute(table) or b"null")
    if not isinstance(claims, dict) or claims.keys() != {"sha256", "offset"}:
        raise ValueError("the table of read chunks has no digest")
    return claims


def same_creation(found: Any, array: ArrayLayout, codec: Codec) -> bool:  # noqa: ANN401
    """Say whether a data set was created as an array is: its chunks and filters."""
    expected = creation(array, codec)
    if found.get_layout() != expected.get_layout():
        return False
    if found.get_layout() == h5d.CHUNKED and found.get_chunk() != expected.get_chunk():
        return False
    filters = [
        [made.get_filter(number)[0] for number in range(made.get_nfilters())]
        for made in (found, expected)
    ]
    return filters[0] == filters[1]


def metadata_nbytes(entries: Iterable[TensorEntry], ranks: int) -> int:
    """Return what libhdf5 needs at most for the data sets and groups of tensors.

    An estimate from above, measured: what it leaves is a hole of a few hundred bytes a tensor, and
    where it were too small, the file would be made in another way.
    """
    nbytes, paths = _ROOT_BYTES + _RANK_BYTES * ranks, []
    for entry in entries:
        text, count = len(description(entry)), read_chunk_count(entry.array)
        nbytes += _DATASET_BYTES + text + 16 * len(entry.array.shape)
        nbytes += _INDEX_BYTES + _INDEXED_BYTES * count if count > 1 else 0
        paths.append(entry.array.path)
    groups = names.parents(paths)
    links = Counter(path.rpartition("/")[0] for path in [*paths, *groups])
    for path in [*paths, *groups]:
        parent, _, name = path.rpartition("/")
        nbytes += _LINK_BYTES + (3 if links[parent] >= _MANY_LINKS else 1) * len(name)
    nbytes += sum(_DENSE_GROUP_BYTES for count in links.values() if count >= _MANY_LINKS)
    return nbytes + _GROUP_BYTES * len(groups)


_ROOT_BYTES = 1024
_RANK_BYTES = 128
_DATASET_BYTES = 320
_GROUP_BYTES = 160
_LINK_BYTES = 64
_MANY_LINKS = 8
_DENSE_GROUP_BYTES = 2048
_INDEX_BYTES = 128
_INDEXED_BYTES = 18
_LONGEST_ATTRIBUTE_BYTES = 60_000
