"""The schema as JSON: the attribute ``dcp_zarr`` of a container's root.

``docs/format.md`` is the contract. A store may come from anybody: whatever is read is checked here,
so that paths stay inside the store, and sizes are those of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from dcp_zarr.canonical_json import Json, digest, tiling_from_json, tiling_to_json
from dcp_zarr.codecs import CHOSEN, Codec
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import CorruptionError, DcpZarrError, FormatError
from dcp_zarr.layout import ArrayLayout
from dcp_zarr.names import OBJECTS_PATH
from dcp_zarr.region import MAX_REGIONS
from dcp_zarr.schema import Entry, ObjectEntry, Schema, TensorEntry
from dcp_zarr.sums_json import sums_from_json, sums_to_json

if TYPE_CHECKING:
    from dcp_zarr.region import Shape, Tiling

FORMAT_VERSION = 2
"""The newest version of the bytes; written only where statistics are stored, else version 1."""

_MAX_AXES = 64
MAX_LIST = 1 << 20
"""Longest list of a nested state dict."""
_MAX_READ_CHUNK_BYTES = 1 << 31
_PATH = re.compile(r"[A-Za-z0-9_~-]+(/[A-Za-z0-9_~-]+)*")


def schema_to_json(schema: Schema) -> dict[str, Json]:
    """Return a schema as JSON, with its digest."""
    codecs: list[Json] = []
    entries = [_entry_to_json(entry, codecs, schema.documents) for entry in schema.entries]
    planner_data = schema.planner_data
    content = {
        "format_version": FORMAT_VERSION if _has_sums(schema) else 1,
        "save_id": schema.save_id,
        "producer": dict(schema.producer),
        "entries": entries,
        "objects_codec": _index(codecs, schema.objects_codec.to_json()),
        "objects_array": _packed_to_json(schema),
        "codecs": codecs,
        "planner_data": None
        if planner_data is None
        else [[fqn, *keys] for fqn, keys in planner_data.items()],
        "storage_meta": None if schema.storage_meta is None else dict(schema.storage_meta),
        "metadata_version": schema.metadata_version,
    }
    return {**content, "digest": digest(content)}


def _has_sums(schema: Schema) -> bool:
    return any(entry.sums is not None for entry in schema.tensors.values())


def _packed_to_json(schema: Schema) -> Json:
    """Describe the one array that several objects share."""
    for entry in schema.objects.values():
        if entry.array is not None and entry.array.path == OBJECTS_PATH:
            return _array_to_json(entry.array, schema.documents)
    return None


def properties_to_json(entry: TensorEntry) -> dict[str, Json]:
    """Return what an array's attribute ``dcp_zarr`` says of its tensor."""
    return {
        "fqn": entry.fqn,
        "torch_dtype": entry.dtype.torch_name,
        "properties": dict(entry.properties),
        "tiling": tiling_to_json(entry.tiling),
    }


def _index(codecs: list[Json], codec: Json) -> int:
    """Return the place of a codec in the table, adding it if it is new."""
    if codec not in codecs:
        codecs.append(codec)
    return codecs.index(codec)


def _entry_to_json(entry: Entry, codecs: list[Json], documents: Mapping[str, str]) -> Json:
    if isinstance(entry, ObjectEntry):
        if entry.array is None:
            return {"fqn": entry.fqn, "json": entry.json[0]}
        if entry.array.path == OBJECTS_PATH:
            return {"fqn": entry.fqn, "offset": entry.offset, "nbytes": entry.nbytes}
        return {"fqn": entry.fqn, **_array_to_json(entry.array, documents)}
    described = {
        **properties_to_json(entry),
        "codec": _index(codecs, entry.codec.to_json()),
        "stored_nbytes": entry.stored_nbytes,
        **_array_to_json(entry.array, documents),
    }
    if entry.dtype.data_type != dtype_of(entry.dtype.torch_name).data_type:
        described["dtype_encoding"] = "bits"
    if entry.sums is not None:
        described["statistics"] = sums_to_json(entry.sums, entry.array.shape)
    return described


def _array_to_json(array: ArrayLayout, documents: Mapping[str, str]) -> dict[str, Json]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "read_chunk_shape": list(array.read_chunk_shape),
        "write_chunk_shape": list(array.write_chunk_shape),
        "document_sha256": documents[array.path],
    }


def schema_from_json(value: Json, *, where: str) -> Schema:
    """Read what `schema_to_json` wrote.

    Parameters
    ----------
    value
        The attribute.
    where
        Path of the checkpoint, for messages.

    Raises
    ------
    FormatError
        If it is of a newer version, or no schema at all.
    CorruptionError
        If it is not what was written.
    """
    check_version(value, where=where)
    content = {key: item for key, item in value.items() if key != "digest"}
    try:
        found = digest(content)
        if value.get("digest") == found:
            return _schema_from_json(content)
    except DcpZarrError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptionError(
            f"The schema in {where!r} is not valid: {error!r}.", path=where
        ) from error
    raise CorruptionError(
        f"The schema in {where!r} was changed after the save: its digest is not that of "
        "its content. Restore it from a copy.",
        path=where,
    )


def check_version(value: Json, *, where: str) -> None:
    """Raise unless something with a ``format_version`` is of a version that can be read.

    Raises
    ------
    FormatError
        If it is of a newer version, or has none.
    """
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise FormatError(f"{where!r} is not a dcp_zarr checkpoint.", path=where)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{where!r} has format version {version}; this dcp_zarr reads up to "
            f"{FORMAT_VERSION}. Install a newer dcp_zarr, or read it with zarr or h5py.",
            path=where,
        )


def _check_packed(packed: ArrayLayout | None, entries: Iterable[Entry]) -> None:
    """Raise unless the array of objects is as long as its objects: longer, it has no end."""
    objects = [entry for entry in entries if isinstance(entry, ObjectEntry)]
    end = max((o.offset + o.nbytes for o in objects if o.array is packed), default=0)
    if packed is not None and packed.shape != (end,):
        raise ValueError(f"the array of objects has {packed.shape[0]} bytes, its objects {end}")


def _schema_from_json(value: dict[str, Json]) -> Schema:
    codecs = [_codec_from_json(codec) for codec in value["codecs"]]
    packed = value["objects_array"] and _array_from_json(OBJECTS_PATH, value["objects_array"], 1)
    documents: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for item in [*value["entries"], value["objects_array"]]:
        if (
            item
            and "path" in item
            and documents.setdefault(item["path"], _text(item["document_sha256"]))
            != item["document_sha256"]
        ):
            raise ValueError(f"two arrays at {item['path']!r}")
    for item in value["entries"]:
        is_tensor = "torch_dtype" in item
        entry = _tensor_from_json(item, codecs) if is_tensor else _object_from_json(item, packed)
        if entries.setdefault(entry.fqn, entry) is not entry:
            raise ValueError(f"two entries named {entry.fqn!r}")
    _check_packed(packed, entries.values())
    planner_data, storage_meta = value["planner_data"], value["storage_meta"]
    version = value["metadata_version"]
    return Schema(
        entries=tuple(entries.values()),
        save_id=_text(value["save_id"]),
        objects_codec=codecs[_count(value["objects_codec"])],
        planner_data=None
        if planner_data is None
        else {_text(fqn): tuple(map(_key, keys)) for fqn, *keys in planner_data},
        storage_meta=None if storage_meta is None else _mapping(storage_meta),
        metadata_version=None if version is None else _text(version),
        producer=_mapping(value["producer"]),
        documents=documents,
    )


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _count(value: Json, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise TypeError(f"{value!r:.40} is no number of at least {least}")
    return value


def _shape(value: Json, axes: int, least: int = 0) -> Shape:
    if len(value) != axes:
        raise ValueError(f"{value!r:.40} does not have {axes} axes")
    for item in value:
        _count(item, least)
    return tuple(value)


def _mapping(value: Json) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no object")
    return value


def _key(value: Json) -> str | int:
    if type(value) is int and 0 <= value < MAX_LIST:
        return value
    return _text(value)


def _codec_from_json(value: Json) -> Codec:
    codec = Codec.from_json(value)
    if codec in CHOSEN:
        return codec  # without numcodecs, which takes long to import
    if codec.to_json() != value or codec.compressor() is None:
        raise ValueError(f"{value!r:.80} are no codecs of this format")
    return codec


def _array_from_json(
    fqn: str, value: dict[str, Json], itemsize: int, trailing: Shape = ()
) -> ArrayLayout:
    path, axes = _text(value["path"]), len(value["shape"])
    if not _PATH.fullmatch(path) or axes > _MAX_AXES:
        raise ValueError(f"{path!r:.80} is no path of an array")
    read = _shape(value["read_chunk_shape"], axes, 1)
    write = _shape(value["write_chunk_shape"], axes, 1)
    if any(w % r for w, r in zip(write, read, strict=True)):
        raise ValueError(f"write chunks {write} of {fqn!r} are no multiple of read chunks {read}")
    if prod(read) * itemsize > _MAX_READ_CHUNK_BYTES:
        raise ValueError(f"read chunks {read} of {fqn!r} are too large")
    return ArrayLayout(fqn, path, _shape(value["shape"], axes), itemsize, read, write, trailing)


def _object_from_json(value: dict[str, Json], packed: ArrayLayout | None) -> ObjectEntry:
    fqn = _text(value["fqn"])
    if "json" in value:
        return ObjectEntry(fqn, json=(value["json"],))
    if "path" in value:
        array = _array_from_json(fqn, value, 1)
        (nbytes,) = array.shape
        return ObjectEntry(fqn, (), array, 0, nbytes)
    offset, nbytes = _count(value["offset"]), _count(value["nbytes"])
    if packed is None or offset + nbytes > packed.shape[0]:
        raise ValueError(f"object {fqn!r} lies outside the array of objects")
    return ObjectEntry(fqn, (), packed, offset, nbytes)


def _tensor_from_json(value: dict[str, Json], codecs: list[Codec]) -> TensorEntry:
    fqn = _text(value["fqn"])
    encoding = value.get("dtype_encoding", "native")
    dtype = dtype_of(_text(value["torch_dtype"]), encoding=encoding, fqn=fqn)
    array = _array_from_json(fqn, value, dtype.itemsize, dtype.trailing)
    return TensorEntry(
        array=array,
        dtype=dtype,
        codec=codecs[_count(value["codec"])],
        tiling=_tiling(array.shape, value["tiling"]),
        properties=_mapping(value["properties"]),
        stored_nbytes=_count(value["stored_nbytes"]),
        sums=sums_from_json(value["statistics"], array.shape) if "statistics" in value else None,
    )


def _tiling(shape: Shape, value: Json) -> Tiling:
    axes = len(shape)
    if "step" in value:
        _shape(value["step"], axes, 1)
        regions = prod(_shape(value["count"], axes))
    else:
        regions = len(value["offsets"])
        for pair in zip(value["offsets"], value["sizes"], strict=True):
            for numbers, length in zip(zip(*map(_numbers, pair), strict=True), shape, strict=True):
                if sum(numbers) > length:
                    raise ValueError(f"region {pair!r:.80} reaches outside {shape}")
    if regions > MAX_REGIONS:
        raise ValueError(f"{regions} regions are too many")
    return tiling_from_json(shape, value)


def _numbers(value: Json) -> list[int]:
    return [_count(item) for item in value]
