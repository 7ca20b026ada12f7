"""What is no tensor, in the form in which a destination holds it. torch comes in on request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dcp_zarr.canonical_json import json_text
from dcp_zarr.coordinator import MAX_PACKED_OBJECT_BYTES
from dcp_zarr.errors import UnsafeObjectError
from dcp_zarr.objects import read_objects
from dcp_zarr.rewriting import StoredAs

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry

Read = Mapping[str, StoredAs]
"""Objects by FQN: bytes as they lie in the source, or a value, which JSON may not hold."""


def read_all(source: Source, entries: Collection[ObjectEntry]) -> dict[str, StoredAs]:
    """Read objects, in order.

    Raises
    ------
    CorruptionError
        If bytes are lost or changed.
    """
    found = {entry.fqn: StoredAs(None, entry.json) for entry in entries}
    held = [entry for entry in entries if not entry.json]
    found |= {entry.fqn: StoredAs(payload) for entry, payload in read_objects(source, held)}
    return found


def as_stored(read: Read, *, is_foreign: bool) -> dict[str, StoredAs]:
    """Return objects as containers of ours hold them: as JSON where that says the same.

    Without torch, objects of torch's DCP stay the bytes that they are.
    """
    return {fqn: _as_stored(found, is_foreign=is_foreign) for fqn, found in read.items()}


def _as_stored(found: StoredAs, *, is_foreign: bool) -> StoredAs:
    payload = found.payload
    if payload is None:
        text = json_text(found.json[0])
        return StoredAs(_payload(found)) if text is None else found
    if is_foreign and len(payload) <= MAX_PACKED_OBJECT_BYTES:
        try:
            from dcp_zarr.rank_save import as_json  # noqa: PLC0415
        except ImportError:
            return found
        if (text := as_json(memoryview(payload))) is not None:
            return StoredAs(None, (json.loads(text),))
    return found


def payloads(read: Read) -> dict[str, bytes]:
    """Return objects as `torch.save` writes them."""
    return {fqn: _payload(found) for fqn, found in read.items()}


def _payload(found: StoredAs) -> bytes:
    from dcp_zarr import tensors  # noqa: PLC0415

    if found.payload is not None:
        return found.payload
    return tensors.object_payload(tensors.restored(found.json[0]))


def values(read: Read) -> Iterator[tuple[str, Any, str]]:
    """Yield the values of objects with their FQNs, and why there is none where that is so."""
    from dcp_zarr import tensors  # noqa: PLC0415

    for fqn, found in read.items():
        if found.payload is None:
            yield fqn, tensors.restored(found.json[0]), ""
            continue
        try:
            yield fqn, tensors.object_value(found.payload, fqn), ""
        except UnsafeObjectError:
            yield fqn, None, "an object whose unpickling could run code"
