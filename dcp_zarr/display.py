"""The tree of a checkpoint's entries, as text and as HTML. Knows no tensors and no files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_zarr.region import Shape

_UNIT = 1024
_MAX_REPR_LINES = 24
_MAX_DEPTH = 100
_FOLD_FROM = 4
_STYLE = (
    "<style>.dcp-zarr{font:13px/1.5 system-ui,sans-serif}"
    ".dcp-zarr details{margin-left:1.2em}.dcp-zarr .leaf{margin-left:2.3em}"
    ".dcp-zarr code{background:none;color:inherit}.dcp-zarr .faint{opacity:.65}</style>"
)


@dataclass(frozen=True, slots=True)
class Row:
    """What is shown of one entry."""

    fqn: str
    """Fully qualified name."""
    dtype: str
    """Dtype of a tensor; empty for an object."""
    shape: Shape
    """Shape of a tensor."""
    nbytes: int
    """Uncompressed bytes."""
    stored_nbytes: int
    """Bytes as stored."""
    value: str = ""
    """Text of an object's value."""

    def summary(self) -> str:
        """Describe the entry in a line, without its name."""
        if not self.dtype:
            return self.value
        return f"{self.dtype} {list(self.shape)} · {size(self.nbytes)}"


@dataclass(slots=True)
class _Node:
    """A segment of names, with what lies below it."""

    children: dict[str, _Node] = field(default_factory=dict)
    row: Row | None = None

    def rows(self) -> Iterator[Row]:
        if self.row is not None:
            yield self.row
        for child in self.children.values():
            yield from child.rows()

    def totals(self) -> str:
        rows = [row for row in self.rows() if row.dtype]
        if not rows:
            return ""
        elements = sum(prod(row.shape) for row in rows)
        nbytes = size(sum(row.nbytes for row in rows))
        plural = "" if len(rows) == 1 else "s"
        return f"{len(rows)} tensor{plural} · {count(elements)} elements · {nbytes}"


@dataclass(frozen=True, slots=True)
class Tree:
    """The entries of a checkpoint as a tree; notebooks show it so that it can be folded."""

    rows: Sequence[Row]
    """The entries, in their order."""
    title: str
    """First line."""
    max_lines: int | None = None
    """Lines of text at most, for which the deepest levels are folded; None for all."""

    def __str__(self) -> str:
        """Draw the tree as text."""
        root = _grow(self.rows)
        depths = (None,) if self.max_lines is None else (None, *range(_FOLD_FROM, 0, -1))
        lines: list[str] = []
        for depth in depths:
            lines = [self.title, *_lines(root, "", depth)]
            if self.max_lines is None or len(lines) <= self.max_lines:
                return "\n".join(lines)
        hidden = len(lines) - (self.max_lines or 0)
        return "\n".join([*lines[: self.max_lines], f"… {hidden} more lines: tree() shows all"])

    def __repr__(self) -> str:
        """Draw the tree as text."""
        return str(self)

    def _repr_html_(self) -> str:
        """Draw the tree as HTML; every name is escaped."""
        title, body = escape(self.title), _html(_grow(self.rows), depth=0)
        return f"{_STYLE}<div class='dcp-zarr'><b>{title}</b>{body}</div>"


def summary_tree(rows: Sequence[Row], title: str) -> Tree:
    """Return a tree that is short enough for a repr."""
    return Tree(rows, title, _MAX_REPR_LINES)


def _grow(rows: Iterable[Row]) -> _Node:
    root = _Node()
    for row in rows:
        node = root
        for segment in row.fqn.split(".", _MAX_DEPTH):
            node = node.children.setdefault(segment, _Node())
        node.row = row
    return root


def _lines(node: _Node, indent: str, depth: int | None) -> Iterator[str]:
    """Draw what lies below a node, down to a depth."""
    if depth == 0:
        return
    last = len(node.children)
    for number, (segment, child) in enumerate(node.children.items(), start=1):
        branch, below = ("└── ", "    ") if number == last else ("├── ", "│   ")
        described = child.row.summary() if child.row else child.totals()
        yield f"{indent}{branch}{printable(segment)}  {described}".rstrip()
        yield from _lines(child, indent + below, None if depth is None else depth - 1)


def printable(segment: str) -> str:
    """Return a name as it is, or quoted where it would not show."""
    return segment if segment.isprintable() and segment else repr(segment)


def _html(node: _Node, depth: int) -> str:
    parts = []
    for segment, child in node.children.items():
        name = f"<code>{escape(printable(segment))}</code>"
        described = child.row.summary() if child.row else child.totals()
        line = f"{name} <span class='faint'>{escape(described)}</span>"
        if child.children:
            is_open = " open" if depth == 0 else ""
            inner = _html(child, depth + 1)
            parts.append(f"<details{is_open}><summary>{line}</summary>{inner}</details>")
        else:
            parts.append(f"<div class='leaf'>{line}</div>")
    return "".join(parts)


def size(nbytes: float) -> str:
    """Write a number of bytes for people.

    Examples
    --------
    >>> size(0), size(1536), size(3 << 30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < _UNIT:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _UNIT
    return f"{nbytes:.1f} TiB"


def count(number: float) -> str:
    """Write a count for people.

    Examples
    --------
    >>> count(12), count(124_000_000)
    ('12', '124.0 M')
    """
    for unit in ("", " K", " M", " G"):
        if number < 1000:  # noqa: PLR2004
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"
