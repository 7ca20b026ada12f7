"""The description of a checkpoint: every tensor and object.

The schema holds what DCP's `Metadata` holds and where each array lies, without torch and without
pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dcp_zarr.dtypes import DType, dtype_of

if TYPE_CHECKING:
    from dcp_zarr.canonical_json import Json
    from dcp_zarr.codecs import Codec
    from dcp_zarr.layout import ArrayLayout
    from dcp_zarr.region import Tiling
    from dcp_zarr.value_sums import ValueSums

Keys = tuple[str | int, ...]


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
    sums: ValueSums | None = None
    """What its values come to, where the save was asked to store that."""

    @property
    def fqn(self) -> str:
        """Fully qualified name."""
        return self.array.fqn


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One entry of a state dict that is not a tensor.

    Either `json` holds its value, or its bytes, as `torch.save` writes them, lie in an array. Of a
    file of another format, `json` holds a value that JSON may not.
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
    refused: str = ""
    """What it is, where its value is not handed out because only running code could make it."""


Entry = TensorEntry | ObjectEntry


@dataclass(frozen=True)
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
    is_foreign: bool = False
    """Whether others saved it: read chunks are made when they are read, and nothing checks them."""
    shared: tuple[tuple[str, ...], ...] = ()
    """FQNs of tensors that share bytes, together, in a file of ``torch.save``."""
    keys_as_text: tuple[str, ...] = ()
    """Names of dicts in such a file of which keys that were no text are told as text."""

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """The tensors by FQN."""
        return {entry.fqn: entry for entry in self.entries if isinstance(entry, TensorEntry)}

    @cached_property
    def objects(self) -> dict[str, ObjectEntry]:
        """The objects by FQN."""
        return {entry.fqn: entry for entry in self.entries if isinstance(entry, ObjectEntry)}

    def only(self, fqns: Collection[str]) -> Schema:
        """Return the schema of some entries, as if nothing else had been saved."""
        keys = self.planner_data
        return replace(
            self,
            entries=tuple(entry for entry in self.entries if entry.fqn in fqns),
            planner_data=keys and {fqn: keys[fqn] for fqn in keys if fqn in fqns},
        )

    def arrays(self) -> Iterator[tuple[ArrayLayout, DType, Codec]]:
        """Iterate over every array of the container, those of objects included, once each."""
        seen = set()
        for entry in self.entries:
            if isinstance(entry, TensorEntry):
                yield entry.array, entry.dtype, entry.codec
            elif entry.array is not None and entry.array.path not in seen:
                seen.add(entry.array.path)
                yield entry.array, dtype_of("uint8"), self.objects_codec
