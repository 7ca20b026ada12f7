"""Reading what is not a tensor, as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr import engine
from dcp_zarr.errors import CorruptionError
from dcp_zarr.region import Region
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import ObjectEntry

_READ_BYTES = 64 << 20
"""Bytes of neighbouring objects that are read at once."""


def read_objects(
    source: Source, entries: Iterable[ObjectEntry]
) -> Iterator[tuple[ObjectEntry, bytes]]:
    """Yield the bytes of objects that are stored as bytes, each as `torch.save` wrote it.

    Neighbours are read together. The order is that in which they lie in the container.

    Raises
    ------
    CorruptionError
        If bytes are lost or changed; it names an object.
    """
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
            names = ", ".join(repr(entry.fqn) for entry in together[:3])
            raise CorruptionError(
                f"Object {names} in {source.where!r} cannot be read: {error}",
                fqn=together[0].fqn,
                path=source.where,
            ) from error
        for entry in together:
            yield entry, out[entry.offset - start : entry.offset - start + entry.nbytes].tobytes()


def _neighbourhood(entry: ObjectEntry) -> tuple[str, int]:
    path, offset = _place(entry)
    return path, offset // _READ_BYTES


def _place(entry: ObjectEntry) -> tuple[str, int]:
    assert entry.array is not None  # noqa: S101
    return entry.array.path, entry.offset
