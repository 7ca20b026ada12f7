"""One page of sections that stands alone: no file beside it, and no request to any host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dcp_zarr.display import printable

_MAX_ROWS = 200
# The browser itself refuses whatever the page would load.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_STYLE = """<style>
:root{color-scheme:light dark;--ink:#1f2328;--faint:#59636e;--paper:#fff;--line:#d1d9e0;
--tint:#f6f8fa;--link:#0969da}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--faint:#9198a1;--paper:#0d1117;
--line:#3d444d;--tint:#151b23;--link:#4493f8}}
body{margin:0 auto;padding:28px 24px 64px;max-width:1024px;background:var(--paper);
color:var(--ink);font:14px/1.55 system-ui,sans-serif}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 10px}
header p{margin:4px 0 0;color:var(--faint);overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin:18px 0 0;padding:8px 0;
border:solid var(--line);border-width:1px 0}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
section{margin-top:36px;scroll-margin-top:12px}
section>p{color:var(--faint);margin:0 0 10px;max-width:46em}
.facts{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0 0}
.facts div{background:var(--tint);border:1px solid var(--line);border-radius:6px;
padding:8px 16px;min-width:96px}
.facts b{display:block;font-size:20px;line-height:1.3;font-variant-numeric:tabular-nums}
.facts span{color:var(--faint);font-size:13px}
.wide{overflow:auto;max-height:445px}
table{border-collapse:separate;border-spacing:0;font-variant-numeric:tabular-nums}
th,td{padding:4px 24px 4px 0;text-align:left;white-space:nowrap;
border-bottom:1px solid var(--line)}
th{font-weight:600;position:sticky;top:0;background:var(--paper)}
th.n,td.n{text-align:right}
td code{font:12px/1.6 ui-monospace,Menlo,Consolas,monospace}
.pictures{display:flex;flex-wrap:wrap;gap:16px 24px}
section svg{display:block;margin:0 0 8px -8px}
section .dcp-zarr strong{display:none}
section>details{margin-top:8px}
section>details>summary{cursor:pointer;color:var(--link)}
</style>"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    anchor: str
    """Where links go."""
    title: str
    """Heading."""
    html: str
    """What it shows."""


def page(
    title: str, notes: Iterable[str], facts: Iterable[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """Return a page.

    Parameters
    ----------
    title
        Heading, and what the window is called.
    notes
        Lines below it.
    facts
        Numbers, each with what it is of.
    sections
        The parts.
    """
    name = escape(printable(title))
    links = "".join(f"<a href='#{s.anchor}'>{escape(s.title)}</a>" for s in sections)
    bodies = "".join(
        f"<section id='{s.anchor}'><h2>{escape(s.title)}</h2>{s.html}</section>" for s in sections
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{name}</title>{_STYLE}</head><body><header><h1>{name}</h1>"
        f"{''.join(f'<p>{escape(printable(note))}</p>' for note in notes)}<div class='facts'>"
        f"{''.join(f'<div><b>{escape(n)}</b><span>{escape(of)}</span></div>' for n, of in facts)}"
        f"</div></header><nav>{links}</nav><main>{bodies}</main></body></html>\n"
    )


def paragraph(content: str) -> str:
    """Return a line of text, escaped."""
    return f"<p>{escape(printable(content))}</p>"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], numbers_from: int) -> str:
    """Return a table, escaped: names in the first column, numbers to the right from one column on.

    Of many rows the first are shown.
    """
    parts = [_row(heads, numbers_from, "th")]
    parts += (_row([_cell(v) for v in row], numbers_from, "td") for row in rows[:_MAX_ROWS])
    rest = paragraph(f"… {len(rows) - _MAX_ROWS:,} more") if len(rows) > _MAX_ROWS else ""
    return f"<div class='wide'><table>{''.join(parts)}</table></div>{rest}"


def _row(cells: Sequence[str], numbers_from: int, tag: str) -> str:
    parts = []
    for place, cell in enumerate(cells):
        content = f"<code>{escape(cell)}</code>" if tag == "td" and not place else escape(cell)
        parts.append(f"<{tag}{' class=n' if place >= numbers_from else ''}>{content}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))


def collapsed(title: str, html: str) -> str:
    """Return something that a click shows."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def side_by_side(pictures: Iterable[str]) -> str:
    """Return pictures in rows, as many in each as there is room for."""
    return f"<div class='pictures'>{''.join(pictures)}</div>"
