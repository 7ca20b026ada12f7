"""Memory that a thread uses again and again: fresh memory costs more than a copy."""

from __future__ import annotations

import threading

import numpy as np

_local = threading.local()


def scratch(name: str, nbytes: int) -> memoryview:
    """Return this thread's memory of that name, of so many bytes; its content is left over."""
    buffer: memoryview | None = getattr(_local, name, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(1 << (nbytes - 1).bit_length(), np.uint8).data
        setattr(_local, name, buffer)
    return buffer[:nbytes]
