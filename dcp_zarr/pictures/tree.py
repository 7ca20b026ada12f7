"""The tree of a checkpoint's entries, which notebooks draw so that it folds and filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from dcp_zarr.display import count, printable, size
from dcp_zarr.pictures.folding import folded, grown
from dcp_zarr.pictures.tree_html import tree_html

if TYPE_CHECKING:
    from dcp_zarr.display import Row
    from dcp_zarr.pictures.folding import Node

_MAX_REPR_LINES = 24
_FOLD_FROM = 4
_MAX_NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Tree:
    """The entries of a checkpoint as a tree; notebooks show it so that it can be folded."""

    rows: Sequence[Row]
    """The entries, in their order."""
    title: str
    """First line."""
    max_lines: int | None = None
    """Lines of text at most, for which layers and the deepest levels are folded; None for all."""

    def folded(self) -> str:
        """Draw the tree as text in which layers that repeat are one line."""
        return "\n".join([self.title, *_lines(folded(grown(self.rows)), "", None)])

    def __str__(self) -> str:
        """Draw the tree as text."""
        root = grown(self.rows)
        lines = [self.title, *_lines(root, "", None)]
        if self.max_lines is None or len(lines) <= self.max_lines:
            return "\n".join(lines)
        root = folded(root)
        for depth in (None, *range(_FOLD_FROM, 0, -1)):
            lines = [self.title, *_lines(root, "", depth)]
            if len(lines) <= self.max_lines:
                return "\n".join(lines)
        hidden = len(lines) - self.max_lines
        return "\n".join([*lines[: self.max_lines], f"… {hidden} more lines: tree() shows all"])

    def __repr__(self) -> str:
        """Draw the tree as text."""
        return str(self)

    def _repr_html_(self) -> str:
        """Draw the tree as HTML; repeated layers are one line, and every name is escaped."""
        return tree_html(folded(grown(self.rows)), self.title)


def summary_tree(tree: Tree) -> Tree:
    """Return a tree that is short enough for a repr."""
    return replace(tree, max_lines=_MAX_REPR_LINES)


def _lines(node: Node, indent: str, depth: int | None) -> Iterator[str]:
    """Draw what lies below a node, down to a depth."""
    if depth == 0:
        return
    for child in node.below:
        branch, below = ("└── ", "    ") if child is node.below[-1] else ("├── ", "│   ")
        yield f"{indent}{branch}{_named(child)}  {_described(child)}".rstrip()
        yield from _lines(child, indent + below, None if depth is None else depth - 1)


def _named(node: Node) -> str:
    name = printable(node.name)
    if node.times == 1:
        return name
    if len(name) > _MAX_NAME_LENGTH:  # of many numbers
        name = f"{name[: _MAX_NAME_LENGTH - 20]}…{name[-20:]}"
    return f"{name} ×{node.times}"


def _described(node: Node) -> str:
    if node.rows and len(node.rows) == 1:
        return node.rows[0].summary()
    rows = node.tensors()
    if not rows:
        return node.rows[0].value if node.rows else ""
    nbytes = size(sum(row.nbytes for row in rows))
    if node.rows:
        return f"{rows[0].dtype} {list(rows[0].shape)} · {nbytes}"
    elements = count(sum(prod(row.shape) for row in rows))
    return f"{len(rows)} tensor{'' if len(rows) == 1 else 's'} · {elements} elements · {nbytes}"
