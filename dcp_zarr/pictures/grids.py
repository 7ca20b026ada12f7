"""Pictures of one tensor: its values as a heat map, and who wrote which part of it."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.pictures.colours import BAD, Scale, fill, rgb
from dcp_zarr.pictures.picture import MARGIN, Picture, box, drawn, text

if TYPE_CHECKING:
    from numpy.typing import NDArray

Box = tuple[tuple[int, ...], tuple[int, ...]]
_LEFT, _TOP = MARGIN + 60, 100
_LONG, _SHORT = 512, 144
"""Pixels of the longer side at most, and of the shorter at least, where cells allow it."""
_MAX_CELL = 24
_COLOURS = 255
_MAX_BOXES = 4096
_MAX_RINGS = 200
_MIN_LABELLED = (24, 14)


def heat_map(cells: NDArray[np.float64], shape: Sequence[int], title: str) -> Picture:
    """Draw numbers in a grid; each cell is a pixel at least.

    Parameters
    ----------
    cells
        The numbers, of shape ``(rows, columns)``; what is not finite becomes red, with a ring.
    shape
        What the grid stands for.
    title
        What the numbers are.
    """
    finite = np.isfinite(cells)
    scale = Scale.of(np.unique(cells[finite]).tolist())
    fitting = _sides(*_matrix(shape))
    times = [
        min(max(round(side / count), 1), _MAX_CELL)
        for side, count in zip(fitting, cells.shape[::-1], strict=True)
    ]
    width, height = cells.shape[1] * times[0], cells.shape[0] * times[1]
    pixels = b64encode(_png(cells, scale)).decode()
    legend_end, legend = scale.legend(34, has_bad=not finite.all(), has_nothing=False)
    parts = [
        legend,
        *_axes((width, height), shape),
        f'<image x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{pixels}"/>',
    ]
    for row, column in np.argwhere(~finite)[:_MAX_RINGS]:
        x, y = _LEFT + (column + 0.5) * times[0], _TOP + (row + 0.5) * times[1]
        ring = '"none" stroke="#e53935" stroke-width="2"'
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{max(times) / 2 + 4:g}" fill={ring}/>')
    each = [-(-whole // cut) for whole, cut in zip(_matrix(shape), cells.shape, strict=True)]
    if max(each) > 1:
        parts.append(text(_LEFT, _TOP + height + 18, f"each cell stands for {_times(each)} values"))
    return drawn(title, max(_LEFT + width, legend_end) + MARGIN, _TOP + height + 24, parts)


def region_map(boxes: Sequence[Box], shape: Sequence[int], title: str) -> Picture:
    """Draw boxes of a tensor, each in the colour of its place in the order.

    Of a tensor of more axes two are drawn, first those that are cut, at the start of the others.

    Parameters
    ----------
    boxes
        Offsets and sizes of each, in order.
    shape
        Shape of the tensor.
    title
        What the boxes are.
    """
    axes = _drawn_axes(boxes, len(shape))
    shown = [
        (number, offsets, sizes)
        for number, (offsets, sizes) in enumerate(boxes)
        if all(sizes) and not any(o for axis, o in enumerate(offsets) if axis not in axes)
    ]
    lengths = [shape[axis] for axis in axes]
    rows, columns = _matrix(lengths)
    sides = _sides(rows, columns)
    width, height = sides
    notes = [f"{len(boxes)} region{'' if len(boxes) == 1 else 's'} of {_times(shape)}"]
    if len(shape) > len(axes):
        notes.append(f"axes {axes[0]} and {axes[1]}")
    if len(shown) > _MAX_BOXES:
        notes.append(f"the first {_MAX_BOXES} are drawn")
    parts = [text(MARGIN, 44, ", ".join(notes)), *_axes(sides, lengths, _TOP - 24)]
    padding = [0] * (2 - len(axes))
    for number, offsets, sizes in shown[:_MAX_BOXES]:
        y, x = (padding + [offsets[axis] for axis in axes])[-2:]
        high, wide = ([1, 1] + [sizes[axis] for axis in axes])[-2:]
        place = (
            _LEFT + x * width / columns,
            _TOP - 24 + y * height / rows,
            wide * width / columns,
            high * height / rows,
        )
        slices = ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True))
        share = number / max(len(boxes) - 1, 1)
        look = f'{fill(rgb(share))} stroke="#fff" stroke-width="1"'
        parts.append(box(*place, look, f"{number}: [{slices}]"))
        parts += _number(place, number, is_light=share < 0.6)  # noqa: PLR2004
    return drawn(title, _LEFT + width + MARGIN, _TOP + height, parts)


def _number(
    place: tuple[float, float, float, float], number: int, *, is_light: bool
) -> Iterator[str]:
    """Write the number of a box into it, where there is room."""
    x, y, width, height = place
    if width >= _MIN_LABELLED[0] and height >= _MIN_LABELLED[1]:
        colour = f'fill="{"#fff" if is_light else "#000"}" pointer-events="none"'
        label = text(x + width / 2, y + height / 2 + 4, str(number), anchor="middle")
        yield f"<g {colour}>{label}</g>"


def _drawn_axes(boxes: Sequence[Box], ndim: int) -> list[int]:
    cut = [axis for axis in range(ndim) if len({offsets[axis] for offsets, _ in boxes}) > 1]
    return sorted([*cut, *(axis for axis in range(ndim) if axis not in cut)][:2])


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor whose axes behind the first are one."""
    if len(shape) < 2:  # noqa: PLR2004
        return 1, int(np.prod(shape))
    return shape[0], int(np.prod(shape[1:]))


def _sides(rows: int, columns: int) -> tuple[int, int]:
    """Return width and height in pixels: in proportion, but neither side very short."""
    scale = _LONG / max(rows, columns, 1)
    shortest = 24 if rows == 1 else _SHORT
    return max(round(columns * scale), _SHORT), max(round(rows * scale), shortest)


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a scalar"


def _axes(sides: tuple[int, int], shape: Sequence[int], top: float = _TOP) -> Iterator[str]:
    """Write the numbers of the first and last rows and columns."""
    width, height = sides
    rows, columns = _matrix(shape)
    words = {0: "", 1: "elements", 2: "columns"}.get(len(shape), f"columns ({_times(shape[1:])})")
    yield text(_LEFT, top - 8, "0")
    yield text(_LEFT + width, top - 8, str(max(columns - 1, 0)), anchor="end")
    yield text(_LEFT + width / 2, top - 8, words, anchor="middle") if words else ""
    if len(shape) > 1:
        yield text(_LEFT - 8, top + 10, "0", anchor="end")
        yield text(_LEFT - 8, top + height / 2 + 4, "rows", anchor="end")
        yield text(_LEFT - 8, top + height, str(max(rows - 1, 0)), anchor="end")


def _png(cells: NDArray[np.float64], scale: Scale) -> bytes:
    """Return an image with a pixel for each cell."""
    finite = np.isfinite(cells)
    shares = np.vectorize(scale.share, otypes=[float])(np.where(finite, cells, scale.low))
    places = np.where(finite, np.rint(shares * (_COLOURS - 1)), _COLOURS).astype(np.uint8)
    palette = [*(rgb(n / (_COLOURS - 1)) for n in range(_COLOURS)), BAD]
    rows, columns = places.shape
    lines = np.insert(places, 0, 0, axis=1).tobytes()  # 0: no filter
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    parts = [
        (b"IHDR", header),
        (b"PLTE", bytes(np.array(palette, np.uint8))),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    body = (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)
