"""Layers as rows, kinds of tensors as columns, a number of each tensor as colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dcp_zarr.display import number_in
from dcp_zarr.pictures.colours import BAD, NOTHING, Scale, fill
from dcp_zarr.pictures.folding import ranges
from dcp_zarr.pictures.picture import LETTER, MARGIN, Picture, box, drawn, shortened, text

_TOP = 76
_LABEL = 13
"""Pixels that a label needs."""
_SLANT = 0.71
_MIN_IN_COLUMN = 12
_MAX_WIDTH = 900
_APART = 28


@dataclass(frozen=True, slots=True)
class Cell:
    """One tensor in a layer map."""

    fqn: str
    """Fully qualified name."""
    value: float | None
    """Its number; None where it has none."""
    note: str = ""
    """What else to say of it."""
    is_bad: bool = False
    """Whether it holds NaN or infinity, and is red."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """The layers below one name."""

    stem: str
    cells: dict[tuple[int, str], Cell]

    def block(self) -> _Block:
        """Lay it out."""
        rows = sorted({row for row, _ in self.cells})
        columns = list(dict.fromkeys(column for _, column in self.cells))
        title = ".".join(filter(None, [self.stem, ranges(rows)]))
        sizes = (24 if len(columns) <= 40 else 8, 16 if len(rows) <= 48 else 6)  # noqa: PLR2004
        left = LETTER * max(len(str(row)) for row in rows) + 8
        labels = LETTER * _SLANT * max(len(shortened(column)) for column in columns) + 10
        top = 18 + labels

        def draw(x: float, y: float, scale: Scale) -> Iterator[str]:
            yield text(x, y + 11, title, is_name=True, bold=True)
            for number, column in enumerate(columns):
                if column and number % -(-_LABEL // sizes[0]) == 0:
                    at = x + left + sizes[0] * (number + 0.6)
                    yield text(at, y + top - 5, column, is_name=True, turned=True)
            for number, row in enumerate(rows):
                if number % -(-_LABEL // sizes[1]) == 0:
                    middle = y + top + sizes[1] * number + max(sizes[1], 10) / 2 + 3
                    yield text(x + left - 6, middle, str(row), anchor="end", is_name=True)
                for place, column in enumerate(columns):
                    if (cell := self.cells.get((row, column))) is not None:
                        at = x + left + sizes[0] * place
                        yield _drawn(cell, (at, y + top + sizes[1] * number), sizes, scale)

        width = max(left + sizes[0] * len(columns) + labels, LETTER * len(shortened(title)))
        return _Block(width, top + sizes[1] * len(rows), draw)


@dataclass(frozen=True, slots=True)
class _Block:
    """Something of a size, to be drawn at a place."""

    width: float
    height: float
    draw: Callable[[float, float, Scale], Iterator[str]]


def layer_map(cells: Sequence[Cell], title: str) -> Picture:
    """Draw one number of each tensor.

    Parameters
    ----------
    cells
        The tensors; the first number in a name is the layer, what remains the kind.
    title
        What the number is.
    """
    scale = Scale.of([cell.value for cell in cells if cell.value is not None and not cell.is_bad])
    has_nothing = any(cell.value is None and not cell.is_bad for cell in cells)
    has_bad = any(cell.is_bad for cell in cells)
    width, legend = scale.legend(34, has_bad=has_bad, has_nothing=has_nothing)
    parts = [legend]
    x, y, below = float(MARGIN), float(_TOP), float(_TOP)
    for block in _blocks(cells):
        if x > MARGIN and x + block.width > _MAX_WIDTH:
            x, y = float(MARGIN), below + _APART
        parts += block.draw(x, y, scale)
        below, width = max(below, y + block.height), max(width, x + block.width)
        x += block.width + _APART
    return drawn(title, width + MARGIN, below + MARGIN, parts)


def _blocks(cells: Sequence[Cell]) -> Iterator[_Block]:
    """Sort tensors by what stands before the number of a layer."""
    panels: dict[str, _Panel] = {}
    others = []
    for cell in cells:
        segments = cell.fqn.split(".")
        at = next((n for n, s in enumerate(segments) if number_in(s) is not None), None)
        if at is None:
            others.append(cell)
            continue
        stem, column = ".".join(segments[:at]), ".".join(segments[at + 1 :])
        panel = panels.setdefault(stem, _Panel(stem, {}))
        panel.cells[int(segments[at]), column] = cell
    for panel in panels.values():
        yield panel.block()
    if others:
        yield _others(others, "Not in layers" if panels else "")


def _others(others: Sequence[Cell], title: str) -> _Block:
    """Lay out tensors that are in no layer, in one column or two."""
    in_column = max(_MIN_IN_COLUMN, -(-len(others) // 2))
    column_width = LETTER * max(len(shortened(cell.fqn)) for cell in others) + 48
    top = 18 if title else 0

    def draw(x: float, y: float, scale: Scale) -> Iterator[str]:
        yield text(x, y + 11, title, bold=True) if title else ""
        for number, cell in enumerate(others):
            column, row = divmod(number, in_column)
            at = x + column * column_width, y + top + 18 * row
            yield _drawn(cell, at, (24, 16), scale)
            yield text(at[0] + 30, at[1] + 12, cell.fqn, is_name=True)

    columns, rows = -(-len(others) // in_column), min(in_column, len(others))
    return _Block(columns * column_width, top + 18 * rows, draw)


def _drawn(cell: Cell, at: tuple[float, float], sizes: tuple[int, int], scale: Scale) -> str:
    (x, y), (width, height) = at, (sizes[0] - 1, sizes[1] - 1)
    number = "" if cell.value is None else f"{cell.value:.4g}"
    tip = f"{cell.fqn}: {', '.join(filter(None, [number, cell.note])) or 'no number'}"
    if cell.is_bad:
        cross = f"M{x + width / 2 - 3:.1f} {y + height / 2 - 3:.1f}l6 6m0 -6l-6 6"
        mark = f'<path d="{cross}" stroke="#fff" stroke-width="1.5" pointer-events="none"/>'
        return box(x, y, width, height, fill(BAD), tip) + mark
    look = NOTHING if cell.value is None else scale.fill(cell.value)
    return box(x, y, width, height, look, tip)
