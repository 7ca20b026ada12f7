"""What is not a tensor: read as bytes, and as a mapping of values."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import display, engine, names
from dcp_zarr.containers.foreign.torch_save import plain_object
from dcp_zarr.errors import CorruptionError, UnsafeObjectError
from dcp_zarr.region import Region
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry

_READ_BYTES = 64 << 20
"""Bytes of neighbouring objects that are read at once."""
_MAX_VALUE_LENGTH = 60
_REPR = reprlib.Repr()  # bounded, whatever a value holds again and again
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxtuple = 4, 30, 30, 30
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MAX_VALUE_LENGTH + 2


def read_objects(
    source: Source, entries: Iterable[ObjectEntry]
) -> Iterator[tuple[ObjectEntry, bytes]]:
    """Yield the bytes of objects that are stored as bytes, each as `torch.save` wrote it.

    Neighbours are read together. The order is that in which they lie in the container.

    Raises
    ------
    CorruptionError
        If bytes are lost or changed; it names an object.
    UnsafeObjectError
        If an object's value is not handed out.
    """
    entries = list(entries)
    for entry in entries:
        if entry.refused:
            raise UnsafeObjectError(
                f"Object {entry.fqn!r} in {source.where!r} is {entry.refused}; nothing in "
                "such a file is run. Load it with torch where you trust it.",
                fqn=entry.fqn,
                path=source.where,
            )
    lying = sorted(entries, key=_place)
    for _, group in groupby(
        lying, key=lambda entry: (_place(entry)[0], entry.offset // _READ_BYTES)
    ):
        together = list(group)
        array, start = together[0].array, together[0].offset
        assert array is not None  # noqa: S101
        end = max(entry.offset + entry.nbytes for entry in together)
        out = np.empty(end - start, np.uint8)
        job = engine.ReadJob(
            array, source.schema.objects_codec, Region((start,), (end - start,)), out
        )
        try:
            list(engine.read([job], source, Limits.of(None)))
        except CorruptionError as error:
            some = ", ".join(repr(entry.fqn) for entry in together[:3])
            raise CorruptionError(
                f"Object {some} in {source.where!r} cannot be read: {error}",
                fqn=together[0].fqn,
                path=source.where,
            ) from error
        for entry in together:
            yield entry, out[entry.offset - start : entry.offset - start + entry.nbytes].tobytes()


def _place(entry: ObjectEntry) -> tuple[str, int]:
    assert entry.array is not None  # noqa: S101
    return entry.array.path, entry.offset


def object_row(entry: ObjectEntry) -> display.Row:
    """Return what is shown of an object; nothing is read."""
    text = entry.refused or f"object, {display.size(entry.nbytes)}"
    if entry.json:
        text = _REPR.repr(entry.json[0])
    if len(text) > _MAX_VALUE_LENGTH:
        text = text[: _MAX_VALUE_LENGTH - 1] + "…"
    return display.Row(entry.fqn, "", (), 0, entry.nbytes, text)


class Objects(Mapping[str, Any]):
    """The entries of a checkpoint that are not tensors.

    Plain values come without torch, numpy's scalars as Python's. Others are unpickled by torch with
    ``weights_only=True``, which runs no code and refuses what would.
    """

    def __init__(self, source: Source, entries: Mapping[str, ObjectEntry]) -> None:
        self._source = source
        self._entries = entries

    def __getitem__(self, fqn: str) -> Any:  # noqa: ANN401
        """Return an object by its FQN."""
        if (entry := self._entries.get(fqn)) is None:
            raise names.not_found(fqn, self._entries, where=f"objects of {self._source.where!r}")
        if entry.json:
            return entry.json[0]
        ((_, payload),) = read_objects(self._source, [entry])
        if plain := plain_object(payload, fqn):
            return plain[0]
        from dcp_zarr import tensors  # noqa: PLC0415

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
        rows = (f"{name}: {object_row(entry).value}" for name, entry in named)
        return "\n".join(rows)
