"""Addresses of object stores, and what a container asks of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from dcp_zarr.errors import OptionError

if TYPE_CHECKING:
    from dcp_zarr.container import Buffer

NETWORK_CALLS = 15
"""Calls that keep a store busy: each waits for most of its time."""
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "http", "https")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


class Content(NamedTuple):
    """An object, or the end of one."""

    buffer: memoryview
    """Its bytes."""
    nbytes: int
    """Size of the whole object."""
    version: str | None
    """What the store calls this state of it, if anything."""


class ObjectStore(Protocol):
    """Objects by key; used from several threads.

    What is not there is a FileNotFoundError; all else that fails is a StoreError.
    """

    in_one_process: bool
    """Whether it lives in this process' memory."""

    @property
    def where(self) -> str:
        """Address, for messages."""

    def check_writable(self) -> None:
        """Raise an OptionError unless objects can be written, listed and deleted."""

    def read(self, key: str) -> Content:
        """Return an object."""

    def read_end(self, key: str, nbytes: int) -> Content:
        """Return so many last bytes of an object, or all where it is smaller."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return parts of an object from one byte to another; less where it ends before."""

    def is_unchanged(self, key: str, content: Content) -> bool:
        """Say whether an object is still the one that was read."""

    def write(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object, whatever stands there."""

    def write_new(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object; raise FileExistsError where there is one."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, if they are there."""

    def keys(self, prefix: str = "") -> Iterator[str]:
        """List the keys below one, or all."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store that was handed over as what it is, rather than by its URL."""

    store: Any
    """A Zarr store, or one of obstore's."""

    def __str__(self) -> str:
        """Return what the store calls itself."""
        return re.sub(r" object at 0x[0-9a-f]+", "", str(self.store))

    def __repr__(self) -> str:
        """Return the same, as a path is shown."""
        return repr(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        """Take the store along to another process.

        Raises
        ------
        OptionError
            If it lives in this one's memory.
        """
        if opened(self).in_one_process:
            refuse_other_processes(str(self))
        return StoreAddress, (self.store,)


Place = str | StoreAddress
"""Where a checkpoint is: a local path, a URL, or a store."""


def refuse_other_processes(where: str) -> NoReturn:
    """Raise for a store that no other process sees."""
    raise OptionError(
        f"{where!r} lives in the memory of one process, and no other rank or process sees it. Save "
        "to a path or URL that all see.",
        path=where,
    )


def is_store(place: Place) -> bool:
    """Say whether a place is an object store."""
    return isinstance(place, StoreAddress) or _URL.match(place) is not None


def store_at(path: object) -> Place | None:
    """Return where a checkpoint is, if that is an object store; or a path given as a URL.

    Raises
    ------
    OptionError
        If it is a URL that cannot be used.
    """
    if _kind(path) is not None:
        return StoreAddress(path)
    found = _URL.match(path) if isinstance(path, str) else None
    if found is None:
        return None
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        from urllib.request import url2pathname  # noqa: PLC0415  takes long

        return url2pathname(rest.removeprefix("localhost"))
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise OptionError(
            f"{path!r} is no address of a checkpoint. Give a path, or a URL such as "
            "s3://bucket/step-1.zarr; its scheme is s3, gs, az, https or file."
        )
    return found[0].rstrip("/")


def _kind(path: object) -> str | None:
    """Return which library's store something is; it has been imported then."""
    for kind in type(path).__mro__:
        if kind.__module__ == "zarr.abc.store":
            return "zarr"
        if kind.__module__.startswith("obstore"):
            return "obstore"
    return None


def opened(place: Place) -> ObjectStore:
    """Return the store at a place."""
    from dcp_zarr.containers.obstore_objects import (  # noqa: PLC0415  a wheel of its own
        ObstoreObjects,
        store_of_url,
    )

    if isinstance(place, str):
        return ObstoreObjects(store_of_url(place), place)
    if _kind(place.store) == "obstore":
        return ObstoreObjects(place.store, str(place))
    inner: Any = getattr(place.store, "store", None)  # of zarr's own wrapper of obstore
    if _kind(inner) == "obstore":
        return ObstoreObjects(inner, str(place), read_only=place.store.read_only)
    from dcp_zarr.containers.zarr_store_objects import ZarrStoreObjects  # noqa: PLC0415

    return ZarrStoreObjects(place.store, str(place))


def ranges_of(extents: Iterable[tuple[int, int]], largest_gap: int) -> list[tuple[int, int]]:
    """Join extents, given by offset and size, that lie no further apart than that."""
    ranges: list[tuple[int, int]] = []
    for offset, nbytes in sorted(extents):
        if ranges and offset - ranges[-1][1] <= largest_gap:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], offset + nbytes)
        else:
            ranges.append((offset, offset + nbytes))
    return ranges
