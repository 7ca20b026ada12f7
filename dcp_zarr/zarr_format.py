"""Zarr v3 documents, chunk keys and sharding indexes, as bytes; no I/O.

Sources: the Zarr v3 core specification, and its ``sharding_indexed``, ``blosc``, ``zstd``,
``gzip`` and ``crc32c`` codecs. Documents are written here rather than by a library, so that they
stay the same whatever version of it is installed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import names
from dcp_zarr.codecs import CHECKSUM_BYTES, Codec, checksum
from dcp_zarr.errors import CorruptionError, FormatError
from dcp_zarr.garbage import no_collection
from dcp_zarr.schema import Schema, TensorEntry
from dcp_zarr.schema_json import properties_to_json, schema_from_json, schema_to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.dtypes import DType
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Shape

DOCUMENT = "zarr.json"
"""Name of the document in each group and array."""
MISSING = np.uint64(2**64 - 1)
"""Offset and size of a read chunk that a write chunk does not hold."""

Json = dict[str, Any]


def object_key(array: ArrayLayout, write_chunk: Shape) -> str:
    """Return the name of a write chunk's object within its array: ``default`` encoding, dots."""
    return ".".join(["c", *map(str, write_chunk), *("0" for _ in array.trailing)])


def object_path(array: ArrayLayout, write_chunk: Shape) -> str:
    """Return the key of a write chunk's object in the store."""
    return f"{array.path}/{object_key(array, write_chunk)}"


def array_document(
    array: ArrayLayout, dtype: DType, codec: Codec, attributes: Json | None = None
) -> bytes:
    """Return an array's ``zarr.json``."""
    bytes_codec: Json = {"name": "bytes"}
    if dtype.stored.itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    codecs = [bytes_codec, *codec.to_json()]
    if has_index(array):
        codecs = [_indexed_codec(array, dtype, codecs)]
    write = [*array.write_chunk_shape, *array.trailing]
    shape = (*array.shape, *array.trailing)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": write}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": dtype.fill_value,
        "codecs": codecs,
        "dimension_names": dimension_names(shape),
        "attributes": {"dcp_zarr": attributes} if attributes else {},
    }
    return _document(document)


def has_index(array: ArrayLayout) -> bool:
    """Say whether an array's objects hold several read chunks and an index."""
    return array.read_chunk_shape != array.write_chunk_shape


def _indexed_codec(array: ArrayLayout, dtype: DType, codecs: list[Json]) -> Json:
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    configuration = {
        "chunk_shape": [*array.read_chunk_shape, *array.trailing],
        "codecs": codecs,
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    return {"name": "sharding_indexed", "configuration": configuration}


def dimension_names(shape: Shape) -> list[str]:
    """Name the axes by their length, so that xarray finds one size for each name.

    Examples
    --------
    >>> dimension_names((16, 4, 16))
    ['n16', 'n4', 'n16_2']
    """
    seen: dict[int, int] = {}
    named = []
    for size in shape:
        seen[size] = seen.get(size, 0) + 1
        named.append(f"n{size}" + (f"_{seen[size]}" if seen[size] > 1 else ""))
    return named


def group_document(attributes: Json | None = None) -> bytes:
    """Return a group's ``zarr.json``."""
    return _document({"zarr_format": 3, "node_type": "group", "attributes": attributes or {}})


def root_document(schema: Schema) -> bytes:
    """Return the root's ``zarr.json``, which holds the schema."""
    return group_document({"dcp_zarr": schema_to_json(schema)})


def _document(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def array_documents(schema: Schema) -> Iterable[tuple[str, bytes]]:
    """Yield the path and document of each array."""
    tensors = {e.array.path: e for e in schema.entries if isinstance(e, TensorEntry)}
    for array, dtype, codec in schema.arrays():
        tensor = tensors.get(array.path)
        yield (
            array.path,
            array_document(array, dtype, codec, properties_to_json(tensor) if tensor else None),
        )


def store_documents(schema: Schema) -> Iterable[tuple[str, bytes]]:
    """Yield the key and document of each group and array and, last, of the root."""
    documents = dict(array_documents(schema))
    digests = {path: document_digest(document) for path, document in documents.items()}
    groups = dict.fromkeys(names.parents(documents), group_document())
    for path, document in {**groups, **documents}.items():
        yield f"{path}/{DOCUMENT}", document
    yield DOCUMENT, root_document(replace(schema, documents=digests))


def document_digest(document: bytes) -> str:
    """Return the SHA-256 of a document's bytes, in hex."""
    return hashlib.sha256(document).hexdigest()


@no_collection()
def read_root(document: bytes, *, where: str) -> Schema:
    """Return the schema in a root document.

    Raises
    ------
    FormatError
        If it is not ours.
    CorruptionError
        If it is damaged.
    """
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"The root document of {where!r} is not JSON: {error}. Restore zarr.json from a copy.",
            path=where,
        ) from error
    attributes = value.get("attributes") if isinstance(value, dict) else None
    if not isinstance(attributes, dict) or "dcp_zarr" not in attributes:
        raise FormatError(
            f"{where!r} is a Zarr group, but not a dcp_zarr checkpoint: its attributes have no "
            "'dcp_zarr'. Open it with zarr.",
            path=where,
        )
    return schema_from_json(attributes["dcp_zarr"], where=where)


def is_checkpoint(document: bytes) -> bool:
    """Say whether a root document is that of a checkpoint, of any version, sound or not."""
    try:
        return "dcp_zarr" in json.loads(document)["attributes"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def encode_index(extents: NDArray[np.uint64]) -> bytes:
    """Return a write chunk's index: offset and size of each read chunk in C order, and a crc32c.

    Parameters
    ----------
    extents
        Shape ``(read chunks, 2)``; ``MISSING`` twice where there is none.
    """
    encoded = extents.astype("<u8").tobytes()
    return encoded + checksum(encoded)


def index_nbytes(array: ArrayLayout) -> int:
    """Return the size of the index at the end of each of an array's objects."""
    return prod(array.read_chunks_per_write_chunk) * 16 + CHECKSUM_BYTES


def decode_index(encoded: bytes, array: ArrayLayout) -> NDArray[np.uint64]:
    """Return the extents in an index, of shape ``(*read_chunks_per_write_chunk, 2)``.

    Raises
    ------
    CorruptionError
        If its checksum does not hold.
    """
    body, stored = encoded[:-CHECKSUM_BYTES], encoded[-CHECKSUM_BYTES:]
    if len(encoded) != index_nbytes(array) or checksum(body) != stored:
        raise CorruptionError("The checksum of its index does not hold.")
    return np.frombuffer(body, "<u8").reshape(*array.read_chunks_per_write_chunk, 2)
