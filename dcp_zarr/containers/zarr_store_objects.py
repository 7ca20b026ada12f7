"""Objects in any Zarr store. It is asynchronous: its calls run in zarr's own event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from dcp_zarr.containers.object_store import Content
from dcp_zarr.errors import OptionError, StoreError

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store

    from dcp_zarr.container import Buffer

Result = TypeVar("Result")


class ZarrStoreObjects:
    """The objects of a Zarr store.

    Parameters
    ----------
    objects
        The store.
    where
        Its address, for messages.
    """

    def __init__(self, objects: Store, where: str) -> None:
        self._store = objects
        self._where = where
        innermost: Any = objects
        while hasattr(innermost, "_store"):  # zarr's wrappers
            innermost = innermost._store
        self.in_one_process = isinstance(innermost, MemoryStore)

    @property
    def where(self) -> str:
        """Address of the store."""
        return self._where

    def check_writable(self) -> None:
        """Raise unless objects can be written, listed and deleted."""
        store = self._store
        able = store.supports_writes and store.supports_deletes and store.supports_listing
        if store.read_only or not able:
            raise OptionError(
                f"{self._where!r} is read-only, or cannot delete or list; a save needs a store "
                "that can.",
                path=self._where,
            )

    def _call(
        self, doing: str, key: str, call: Callable[[], Coroutine[Any, Any, Result]]
    ) -> Result:
        try:
            return sync(call())
        except Exception as error:
            raise StoreError(
                f"{doing} {key!r} in {self._where!r} failed: {type(error).__name__}: {error}",
                path=self._where,
            ) from error

    def _get(self, key: str, byte_range: ByteRequest | None = None) -> memoryview:
        prototype = default_buffer_prototype()
        found = self._call("Reading", key, lambda: self._store.get(key, prototype, byte_range))
        if found is None:
            raise FileNotFoundError(key)
        return memoryview(found.to_bytes())

    def read(self, key: str) -> Content:
        """Return an object."""
        content = self._get(key)
        return Content(content, len(content), None)

    def read_end(self, key: str, nbytes: int) -> Content:
        """Return the end of an object; its size is another call."""
        size = self._call("Reading", key, lambda: self._store.getsize(key))
        return Content(self._get(key, SuffixByteRequest(nbytes)), size, None)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return parts of an object."""
        return [self._get(key, RangeByteRequest(start, end)) for start, end in ranges]

    def is_unchanged(self, key: str, content: Content) -> bool:
        """Say whether an object is still the one that was read: by reading it again."""
        try:
            return self._get(key) == content.buffer
        except FileNotFoundError:
            return False

    def write(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object, whatever stands there."""
        content = default_buffer_prototype().buffer.from_bytes(b"".join(buffers))
        self._call("Writing", key, lambda: self._store.set(key, content))

    def write_new(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object; raise FileExistsError where there was one a moment ago."""
        if self._call("Reading", key, lambda: self._store.exists(key)):
            raise FileExistsError(key)
        self.write(key, buffers)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, if they are there."""
        for key in keys:
            self._call("Deleting", key, lambda key=key: self._store.delete(key))  # type: ignore[misc]

    def keys(self, prefix: str = "") -> Iterator[str]:
        """List the keys below one, or all."""

        async def listed() -> list[str]:
            return [key async for key in self._store.list_prefix(prefix)]

        yield from self._call("Listing", prefix, listed)
