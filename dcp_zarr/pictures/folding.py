"""Names as a tree, in which layers that repeat fold into one. Knows no drawing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dcp_zarr.display import number_in

if TYPE_CHECKING:
    from dcp_zarr.display import Row

_MAX_DEPTH = 100


@dataclass(slots=True)
class Node:
    """A name, or a segment of names, with what lies below it."""

    name: str = ""
    """The segment; several with dots between where each is the only one below the one before."""
    rows: list[Row] = field(default_factory=list)
    """The entry of this very name, if there is one; of layers folded into one, that of each."""
    below: list[Node] = field(default_factory=list)
    """What lies below it."""
    times: int = 1
    """How many layers are folded into it."""

    def tensors(self) -> list[Row]:
        """Return the tensors it stands for: of its own name, or else all below."""
        return [row for row in (self.rows or self._all_rows()) if row.dtype]

    def _all_rows(self) -> Iterator[Row]:
        yield from self.rows
        for child in self.below:
            yield from child._all_rows()


def grown(rows: Iterable[Row]) -> Node:
    """Return the tree of all names."""
    root = Node()
    found: dict[tuple[int, str], Node] = {}
    for row in rows:
        node = root
        for segment in row.fqn.split(".", _MAX_DEPTH):
            place = id(node), segment
            if place not in found:
                found[place] = Node(segment)
                node.below.append(found[place])
            node = found[place]
        node.rows.append(row)
    return root


def folded(root: Node) -> Node:
    """Return a tree in which equal layers are one, and only children are named with their parent.

    Layers are what is named by a number. They are equal where what lies below them has equal
    names, dtypes, shapes and values of objects.
    """
    return _folded(root, {})[0]


def _folded(node: Node, kinds: dict[Hashable, int]) -> tuple[Node, int]:
    """Fold what lies below a node; return a number too that equal nodes share."""
    together: dict[tuple[int, str | None], list[Node]] = {}
    for child in node.below:
        below, kind = _folded(child, kinds)
        is_layer = number_in(child.name) is not None
        together.setdefault((kind, None if is_layer else child.name), []).append(below)
    made = replace(node, below=[_joined(_merged(members)) for members in together.values()])
    own = [(row.dtype, row.shape, row.value) for row in node.rows]
    parts = [(child.name, kind) for child, (kind, _) in zip(made.below, together, strict=True)]
    return made, kinds.setdefault((*own, *parts), len(kinds))


def _merged(nodes: Sequence[Node]) -> Node:
    """Return equal layers as one."""
    if len(nodes) == 1:
        return nodes[0]
    return replace(_overlaid(nodes), name=ranges([int(node.name) for node in nodes]))


def _overlaid(nodes: Sequence[Node]) -> Node:
    below = [_overlaid(children) for children in zip(*(node.below for node in nodes), strict=True)]
    rows = [row for node in nodes for row in node.rows]
    return Node(nodes[0].name, rows, below, sum(node.times for node in nodes))


def _joined(node: Node) -> Node:
    while len(node.below) == 1 and not node.rows:
        (only,) = node.below
        node = replace(only, name=f"{node.name}.{only.name}")
    return node


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers in a bracket, those without a gap as a range.

    Examples
    --------
    >>> ranges([0, 1, 2, 5, 7, 8])
    '[0-2,5,7,8]'
    """
    numbers = sorted(numbers)
    starts = [n for n, (a, b) in enumerate(pairwise(numbers), start=1) if b - a > 1]
    runs = [numbers[a:b] for a, b in pairwise([0, *starts, len(numbers)])]
    short = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]  # noqa: PLR2004
    return f"[{','.join(short)}]"
