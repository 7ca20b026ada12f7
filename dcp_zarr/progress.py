"""A bar on standard error while things are read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def tracked(items: Iterable[Item], count: int, what: str) -> Iterator[Item]:
    """Yield items, so many, and show how far that is where standard error is a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import track  # noqa: PLC0415

    console = Console(stderr=True)
    shown = track(items, what, total=count, console=console) if console.is_terminal else items
    yield from shown


@contextmanager
def counted(what: str, nbytes: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Give what is to be told of bytes that are done; show how far that is, as `tracked` does."""
    if not shown:
        yield _nothing
        return
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(
        *progress.Progress.get_default_columns(),
        *columns,
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)


def _nothing(_: int) -> None:
    """Show nothing."""
