"""Words that the commands of ``dcp-zarr`` share: arguments, numbers, JSON and a bar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Annotated, Any

import typer

from dcp_zarr.errors import OptionError

Path = Annotated[str, typer.Argument(help="The checkpoint.")]
Pattern = Annotated[
    str,
    typer.Argument(
        help="Name, with all below it, or pattern: * in a segment, ** across, [0-3] for numbers."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give what shows on standard error how many bytes of how many are done."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task(what)
        yield lambda done, nbytes: shown.update(task, completed=done, total=nbytes)


def number_of_bytes(text: str) -> int:
    """Return a number of bytes: 5GB are 5 * 1000**3, and 5GiB are 5 * 1024**3."""
    found = re.fullmatch(r"(\d+) *(?:([KMGT])(i?))?B?", text, re.IGNORECASE)
    if found is None:
        raise OptionError(f"{text!r} is no number of bytes; write it as 5GB, 5GiB or 5000000000.")
    number, unit, binary = found.groups(default="")
    factor: int = (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    return int(number) * factor


def print_json(value: Any) -> None:  # noqa: ANN401
    """Print a value as JSON."""
    typer.echo(json_of(value))


def json_of(value: Any) -> str:  # noqa: ANN401
    """Return a value as one line of strict JSON."""
    return json.dumps(_strict(value), ensure_ascii=False, default=repr)


def _strict(value: Any) -> Any:  # noqa: ANN401
    """Return a value as strict JSON has it: null for what is no number."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, dict):
        return {
            key if isinstance(key, (str, int)) else repr(key): _strict(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
