"""Objects in S3, GCS, Azure and over HTTP, through obstore; it retries, with back-off.

Its calls let go of the GIL: they are made from the threads that need the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import obstore
from obstore import exceptions, store

from dcp_zarr.containers.object_store import Content
from dcp_zarr.errors import OptionError, StoreError

if TYPE_CHECKING:
    from obstore import GetOptions

    from dcp_zarr.container import Buffer

_REFUSED = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError


def store_of_url(url: str) -> store.ObjectStore:
    """Return the store of a URL; credentials and the like come from environment variables.

    Raises
    ------
    OptionError
        If obstore finds no store in it.
    """
    scheme = url.partition(":")[0].lower()
    try:
        if scheme in ("http", "https"):  # whoever the host is: no credentials, and read-only
            return store.HTTPStore(url, client_options={"allow_http": scheme == "http"})
        return store.from_url(url)
    except (exceptions.BaseError, ValueError) as error:
        raise OptionError(
            f"{url!r} cannot be used: {_text(error)}. Endpoint, region, account and credentials "
            "come from the environment variables of its kind, such as AWS_ENDPOINT_URL."
        ) from error


class ObstoreObjects:
    """The objects of one of obstore's stores.

    Parameters
    ----------
    objects
        The store.
    where
        Its address, for messages.
    read_only
        Whether writing is refused.
    """

    def __init__(self, objects: store.ObjectStore, where: str, *, read_only: bool = False) -> None:
        self._store = objects
        self._where = where
        self._read_only = read_only or isinstance(objects, store.HTTPStore)
        self._creates = True
        self._pid = os.getpid()
        self.in_one_process = isinstance(objects, store.MemoryStore)

    @property
    def where(self) -> str:
        """Address of the store."""
        return self._where

    def check_writable(self) -> None:
        """Raise unless objects can be written."""
        if self._read_only:
            raise OptionError(
                f"{self._where!r} can be read, but not written. Save to a path, or to s3://, gs:// "
                "or az://.",
                path=self._where,
            )

    @contextmanager
    def _calling(self, doing: str, key: str) -> Iterator[None]:
        """Turn whatever obstore raises into our error, which says what was done to what."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self._where!r} was opened before this process was forked, and its connections "
                "cannot be used here. Open it in this process, and start processes with spawn or "
                "forkserver.",
                path=self._where,
            )
        try:
            yield
        except (FileNotFoundError, exceptions.NotSupportedError, exceptions.NotModifiedError):
            raise
        except exceptions.AlreadyExistsError as error:
            raise FileExistsError(key) from error
        except (exceptions.BaseError, OSError) as error:
            self._fail(doing, key, error)

    def _fail(self, doing: str, key: str, error: Exception) -> NoReturn:
        advice = "Check the address, the network and the credentials"
        if isinstance(error, (*_REFUSED, PermissionError)):
            advice = "Access is refused: check the credentials, and that they have not expired"
        elif "GET http://" in str(error) and "builder error" in str(error):
            advice = "Set AWS_ALLOW_HTTP=true, or take an endpoint that is https://"
        raise StoreError(
            f"{doing} {key!r} in {self._where!r} failed. {advice}. {_text(error)}",
            path=self._where,
        ) from error

    def read(self, key: str) -> Content:
        """Return an object."""
        return self._get(key, {})

    def read_end(self, key: str, nbytes: int) -> Content:
        """Return the end of an object; Azure has to be asked for its size first."""
        try:
            return self._get(key, {"range": {"suffix": nbytes}})
        except exceptions.NotSupportedError:
            with self._calling("Reading", key):
                size = obstore.head(self._store, key)["size"]
            (end,) = self.read_ranges(key, [(max(size - nbytes, 0), size)])
            return Content(end, size, None)

    def _get(self, key: str, options: GetOptions) -> Content:
        with self._calling("Reading", key):
            found = obstore.get(self._store, key, options=options)
            return Content(memoryview(found.bytes()), found.meta["size"], found.meta["e_tag"])

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return parts of an object; each is one request, and some run at once."""
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            with self._calling("Reading", key):
                found = obstore.get_ranges(self._store, key, starts=starts, ends=ends)
        except exceptions.NotSupportedError:  # a web server that knows no ranges
            whole = self.read(key).buffer
            return [whole[start:end] for start, end in ranges]
        return [memoryview(part) for part in found]

    def is_unchanged(self, key: str, content: Content) -> bool:
        """Say whether an object is still the one that was read; one small request."""
        if content.version is None:
            return self.read(key).buffer == content.buffer
        try:
            self._get(key, {"if_none_match": content.version})
        except exceptions.NotModifiedError:
            return True
        except FileNotFoundError:
            return False
        return False

    def write(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object, whatever stands there."""
        with self._calling("Writing", key):
            obstore.put(self._store, key, b"".join(buffers))

    def write_new(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Write an object that is not there.

        A store that was told not to know conditions (AWS_CONDITIONAL_PUT=disabled) writes it
        whatever is there.
        """
        content = b"".join(buffers)
        try:
            with self._calling("Writing", key):
                obstore.put(self._store, key, content, mode="create" if self._creates else None)
        except FileExistsError:
            # So ends a request whose first answer got lost on the way, too.
            if self.read(key).buffer != content:
                raise
        except exceptions.NotSupportedError:
            self._creates = False
            self.write(key, [content])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, many in a request where the store can."""
        try:
            with self._calling("Deleting", keys[0] if keys else ""):
                obstore.delete(self._store, list(keys))
        except FileNotFoundError:  # some stores stop there
            for key in keys if len(keys) > 1 else []:
                self.delete([key])

    def keys(self, prefix: str = "") -> Iterator[str]:
        """List the keys below one, or all."""
        with self._calling("Listing", prefix):
            for some in obstore.list(self._store, prefix or None):
                yield from (meta["path"] for meta in some)


def _text(error: Exception) -> str:
    """Return what an error says, without the part that is for obstore's developers."""
    return str(error).partition("\n\nDebug source")[0].strip()
