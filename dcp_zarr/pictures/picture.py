"""A picture as a value, and the parts of SVG that every picture is made of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from dcp_zarr.display import printable
from dcp_zarr.local_files import page_target, write_page

MARGIN = 8
"""Pixels around a picture."""
LETTER = 6.7
"""Width of a letter of a name, in pixels."""
_MAX_NAME_LENGTH = 44
_MAX_TITLE_LENGTH = 72
_FONT = "system-ui,sans-serif"
_NAME_FONT = "ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace"
# One rule for a file of its own; on a page or in a notebook the text has the colour around it.
_STYLE = (
    "<style>svg{color:#1f2328;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}</style>"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a checkpoint or tensor, which notebooks draw.

    Examples
    --------
    >>> import dcp_zarr, torch
    >>> _ = dcp_zarr.save({"w": torch.randn(6, 4)}, "step-1.zarr")
    >>> picture = dcp_zarr.open_checkpoint("step-1.zarr")["w"].heat_map()
    >>> picture
    Picture 'w: largest absolute values': a notebook draws it; save("x.svg") or save("x.html")
    >>> picture.save("w.svg")
    """

    title: str
    """What it shows."""
    svg: str
    """The picture as SVG, in which nothing is asked of any host."""

    def __repr__(self) -> str:
        """Say what it shows."""
        return f'Picture {self.title!r}: a notebook draws it; save("x.svg") or save("x.html")'

    def _repr_html_(self) -> str:
        """Draw the picture."""
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that any browser shows, light or dark as the system is.

        Parameters
        ----------
        path
            Ends in ``.svg`` or ``.html``; what stands there is replaced.

        Raises
        ------
        OptionError
            If it ends otherwise, or cannot be a file.
        """
        target = page_target(path, (".svg", ".html"))
        head, tail = self.svg.split(">", 1)
        text = f"{head}>{_STYLE}{tail}"
        if target.suffix.lower() == ".html":
            title = f"<title>{escape(printable(self.title))}</title>"
            text = f'<!doctype html><meta charset="utf-8">{title}{self.svg}'
            text = text.replace("<svg", f"{_STYLE.replace('svg{', 'html{')}<svg", 1)
        write_page(target, text)


def drawn(title: str, width: float, height: float, parts: Iterable[str]) -> Picture:
    """Return a picture of parts of SVG, below its title."""
    shown = shortened(title, _MAX_TITLE_LENGTH)
    width = max(width, len(shown) * 8.2 + 2 * MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(printable(title))}" style="max-width:100%;height:auto" '
        f'font-family="{_FONT}" font-size="12" fill="currentColor">'
    )
    written = text(MARGIN, 20, shown, bold=True)
    return Picture(title, "".join([head, written, *parts, "</svg>"]))


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    is_name: bool = False,
    bold: bool = False,
    turned: bool = False,
) -> str:
    """Write a line of text, escaped; names in a font of equal widths, and cut in the middle."""
    style = f' font-family="{_NAME_FONT}" font-size="11"' if is_name else ""
    style += ' font-weight="600"' if bold else ""
    style += f' text-anchor="{anchor}"' if anchor != "start" else ""
    style += f' transform="rotate(-45 {x:.1f} {y:.1f})"' if turned else ""
    content = escape(shortened(content) if is_name else printable(content))
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{content}</text>'


def shortened(name: str, most: int = _MAX_NAME_LENGTH) -> str:
    """Return a name as it is shown; one that is long without its middle."""
    name = printable(name)
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def box(x: float, y: float, width: float, height: float, look: str, tip: str = "") -> str:
    """Draw a box; a pointer that rests on it shows the tip."""
    place = f'x="{x:.4g}" y="{y:.6g}" width="{width:.4g}" height="{height:.4g}"'
    if not tip:
        return f"<rect {place} {look}/>"
    return f"<rect {place} {look}><title>{escape(printable(tip))}</title></rect>"
