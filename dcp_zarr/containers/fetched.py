"""What was fetched over a network and may be wanted again soon: once, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Fetched(Generic[Value]):
    """Keeps the last values fetched; threads that want one at once have it fetched once.

    Parameters
    ----------
    most
        How much it keeps, in whatever unit.
    size
        How much a value is.
    """

    def __init__(self, most: int, size: Callable[[Value], int]) -> None:
        self._most = most
        self._size = size
        self._lock = threading.Lock()
        self._values: dict[Hashable, Future[Value]] = {}

    def get(self, key: Hashable, fetch: Callable[[], Value]) -> Value:
        """Return the value of a key, fetched where it is not there."""
        with self._lock:
            future = self._values.get(key)
            if own := future is None:
                future = self._values[key] = Future()
        assert future is not None  # noqa: S101
        if own:
            try:
                future.set_result(fetch())
            except BaseException as error:  # noqa: BLE001  told to all who wait for it
                with self._lock:
                    del self._values[key]
                future.set_exception(error)
            else:
                self._trim()
        return future.result()

    def _trim(self) -> None:
        with self._lock:
            done = [key for key, future in self._values.items() if future.done()]
            kept = sum(self._size(self._values[key].result()) for key in done)
            for key in done:  # the oldest first
                if kept <= self._most:
                    break
                kept -= self._size(self._values.pop(key).result())
