"""Keeps the garbage collector away where it would find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running.

    Describing thousands of tensors makes many small values, none of which is ever part of a cycle.
    The collector, called again and again by their number, would look at every object of the
    process each time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
