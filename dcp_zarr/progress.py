"""A bar on standard error while things are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def tracked(items: Iterable[Item], count: int, what: str) -> Iterator[Item]:
    """Yield items, so many, and show how far that is where standard error is a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import track  # noqa: PLC0415

    console = Console(stderr=True)
    shown = track(items, what, total=count, console=console) if console.is_terminal else items
    yield from shown
