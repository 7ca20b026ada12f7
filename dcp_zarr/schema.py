"""The description of a checkpoint: every tensor and object, as values and as JSON.

The schema holds what DCP's `Metadata` holds and where each array lies, without torch and without
pickle. Its JSON is the attribute ``dcp_zarr`` of the container's root; ``docs/format.md`` is its
contract. Reading checks everything that is used later, so a damaged schema is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from dcp_zarr.canonical_json import Json, digest, tiling_from_json, tiling_to_json
from dcp_zarr.codecs import Codec
from dcp_zarr.dtypes import DType, dtype_of
from dcp_zarr.errors import CorruptionError, DcpZarrError, FormatError
from dcp_zarr.layout import ArrayLayout
from dcp_zarr.names import OBJECTS_PATH

if TYPE_CHECKING:
    from dcp_zarr.region import Tiling

FORMAT_VERSION = 1
"""Version of the bytes that this release writes, and the newest that it reads."""

Keys = tuple[str | int, ...]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    array: ArrayLayout
    """Name, path, shape and chunks."""
    dtype: DType
    """The torch dtype and how it is stored."""
    codec: Codec
    """How its read chunks are compressed."""
    tiling: Tiling
    """The regions in which it was saved, in DCP's order; empty ones may be among them."""
    properties: Mapping[str, Json] = field(default_factory=dict)
    """What DCP records of the tensor besides, where it differs from torch's defaults."""
    stored_nbytes: int = 0
    """Bytes of its read chunks as stored, checksums included."""

    @property
    def fqn(self) -> str:
        """Fully qualified name."""
        return self.array.fqn


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One entry of a state dict that is not a tensor.

    Either `json` holds its value, or its bytes, as `torch.save` writes them, lie in an array.
    """

    fqn: str
    """Fully qualified name."""
    json: tuple[Json, ...] = ()
    """The value, alone in a tuple, where JSON can hold it exactly; else empty."""
    array: ArrayLayout | None = None
    """The array that holds its bytes; None where `json` holds it."""
    offset: int = 0
    """Its first byte in that array."""
    nbytes: int = 0
    """Number of its bytes."""


Entry = TensorEntry | ObjectEntry


@dataclass(frozen=True, slots=True)
class Schema:
    """All of a checkpoint but its bytes."""

    entries: tuple[Entry, ...]
    """Tensors and objects in the order of DCP's `state_dict_metadata`."""
    save_id: str
    """Differs for every save."""
    objects_codec: Codec
    """Codec of the arrays of bytes that hold objects."""
    planner_data: Mapping[str, Keys] | None = None
    """Where each entry stands in the nested state dict: FQN to keys."""
    storage_meta: Mapping[str, Json] | None = None
    """DCP's `StorageMeta`, by field."""
    metadata_version: str | None = None
    """DCP's `Metadata.version`."""
    producer: Mapping[str, str] = field(default_factory=dict)
    """Versions of the programs that wrote the checkpoint."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each array's document, by path."""

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """The tensors by FQN."""
        return {entry.fqn: entry for entry in self.entries if isinstance(entry, TensorEntry)}

    @property
    def objects(self) -> dict[str, ObjectEntry]:
        """The objects by FQN."""
        return {entry.fqn: entry for entry in self.entries if isinstance(entry, ObjectEntry)}

    def arrays(self) -> Iterator[tuple[ArrayLayout, DType, Codec]]:
        """Iterate over every array of the container, those of objects included, once each."""
        seen = set()
        for entry in self.entries:
            if isinstance(entry, TensorEntry):
                yield entry.array, entry.dtype, entry.codec
            elif entry.array is not None and entry.array.path not in seen:
                seen.add(entry.array.path)
                yield entry.array, dtype_of("uint8"), self.objects_codec

    def to_json(self) -> dict[str, Json]:
        """Return the value of the root's attribute ``dcp_zarr``."""
        codecs: list[Json] = []
        planner_data = self.planner_data
        content = {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "producer": dict(self.producer),
            "entries": [_entry_to_json(entry, codecs, self.documents) for entry in self.entries],
            "objects_codec": _index(codecs, self.objects_codec.to_json()),
            "objects_array": self._packed_to_json(),
            "codecs": codecs,
            "planner_data": planner_data and [[fqn, *keys] for fqn, keys in planner_data.items()],
            "storage_meta": self.storage_meta and dict(self.storage_meta),
            "metadata_version": self.metadata_version,
        }
        return {**content, "digest": digest(content)}

    def _packed_to_json(self) -> Json:
        """Describe the one array that several objects share."""
        for entry in self.objects.values():
            if entry.array is not None and entry.array.path == OBJECTS_PATH:
                return _array_to_json(entry.array, self.documents)
        return None

    @classmethod
    def from_json(cls, value: Json, *, where: str) -> Schema:
        """Read what `to_json` wrote.

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
        if not isinstance(value, dict) or not isinstance(value.get("format_version"), int):
            raise FormatError(f"{where!r} is not a dcp_zarr checkpoint.", path=where)
        if (version := value["format_version"]) > FORMAT_VERSION:
            raise FormatError(
                f"{where!r} has format version {version}; this dcp_zarr reads up to "
                f"{FORMAT_VERSION}. Install a newer dcp_zarr, or read it with zarr.",
                path=where,
            )
        content = {key: item for key, item in value.items() if key != "digest"}
        if value.get("digest") != digest(content):
            raise CorruptionError(
                f"The root document of {where!r} was changed after the save: its digest is not "
                "that of its content. Restore zarr.json from a copy.",
                path=where,
            )
        return _read(lambda: _schema_from_json(content), where)


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
    return described


def _array_to_json(array: ArrayLayout, documents: Mapping[str, str]) -> dict[str, Json]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "read_chunk_shape": list(array.read_chunk_shape),
        "write_chunk_shape": list(array.write_chunk_shape),
        "document_sha256": documents[array.path],
    }


def _read(read: Callable[[], Value], where: str) -> Value:
    try:
        return read()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, DcpZarrError):
            raise
        raise CorruptionError(
            f"The root document of {where!r} is not a valid schema: {error!r}.", path=where
        ) from error


def _schema_from_json(value: dict[str, Json]) -> Schema:
    documents: dict[str, str] = {}
    codecs = [Codec.from_json(codec) for codec in value["codecs"]]
    packed = value["objects_array"] and _array_from_json(OBJECTS_PATH, value["objects_array"], 1)

    def entry(item: dict[str, Json]) -> Entry:
        if "torch_dtype" in item:
            return _tensor_from_json(item, codecs)
        return _object_from_json(item, packed)

    for item in [*value["entries"], value["objects_array"]]:
        if item and "path" in item:
            documents[item["path"]] = item["document_sha256"]
    planner_data = value["planner_data"]
    return Schema(
        entries=tuple(map(entry, value["entries"])),
        save_id=value["save_id"],
        objects_codec=codecs[value["objects_codec"]],
        planner_data=None
        if planner_data is None
        else {fqn: tuple(keys) for fqn, *keys in planner_data},
        storage_meta=value["storage_meta"],
        metadata_version=value["metadata_version"],
        producer=value["producer"],
        documents=documents,
    )


def _array_from_json(fqn: str, value: dict[str, Json], itemsize: int) -> ArrayLayout:
    return ArrayLayout(
        fqn=fqn,
        path=value["path"],
        shape=tuple(value["shape"]),
        itemsize=itemsize,
        read_chunk_shape=tuple(value["read_chunk_shape"]),
        write_chunk_shape=tuple(value["write_chunk_shape"]),
    )


def _object_from_json(value: dict[str, Json], packed: ArrayLayout | None) -> ObjectEntry:
    fqn = value["fqn"]
    if "json" in value:
        return ObjectEntry(fqn, json=(value["json"],))
    if "path" in value:
        array = _array_from_json(fqn, value, 1)
        return ObjectEntry(fqn, (), array, 0, array.shape[0])
    if packed is None:
        raise KeyError("objects_array")
    return ObjectEntry(fqn, (), packed, value["offset"], value["nbytes"])


def _tensor_from_json(value: dict[str, Json], codecs: list[Codec]) -> TensorEntry:
    fqn = value["fqn"]
    encoding = value.get("dtype_encoding", "native")
    dtype = dtype_of(value["torch_dtype"], encoding=encoding, fqn=fqn)
    array = replace(_array_from_json(fqn, value, dtype.itemsize), trailing=dtype.trailing)
    return TensorEntry(
        array=array,
        dtype=dtype,
        codec=codecs[value["codec"]],
        tiling=tiling_from_json(array.shape, value["tiling"]),
        properties=value["properties"],
        stored_nbytes=value["stored_nbytes"],
    )
