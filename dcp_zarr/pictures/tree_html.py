"""The tree of a checkpoint's entries as HTML: folds without a script, filters with a short one."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import prod
from typing import TYPE_CHECKING

from dcp_zarr.display import count, printable, size

if TYPE_CHECKING:
    from dcp_zarr.pictures.folding import Node

_OPEN_LINES = 40
"""As many lines are unfolded at first as come to no more than this."""

# Two classes or elements each, so that the styles of notebooks do not win.
_STYLE = """<style>
.dcp-zarr{font:13px/1.55 system-ui,sans-serif;overflow-x:auto;max-width:64rem}
.dcp-zarr>div{min-width:720px}
.dcp-zarr [hidden]{display:none!important}
.dcp-zarr summary,.dcp-zarr .row{display:flex;gap:10px;padding:0 6px 0 18px;border-radius:3px;
list-style:none;position:relative}
.dcp-zarr summary{cursor:pointer;margin:0}
.dcp-zarr summary::-webkit-details-marker{display:none}
.dcp-zarr summary::before{content:"";position:absolute;left:5px;top:6px;opacity:.6;
border:4px solid transparent;border-left:5px solid;border-right-width:0}
.dcp-zarr details[open]>summary::before{transform:rotate(90deg)}
.dcp-zarr summary:hover,.dcp-zarr .lines .row:hover{
background:color-mix(in srgb,currentColor 8%,transparent)}
.dcp-zarr .lines details{margin:0}
.dcp-zarr .lines details>:not(summary){margin-left:16px}
.dcp-zarr .row code,.dcp-zarr summary code{font:12px/20px ui-monospace,Menlo,Consolas,monospace;
background:none;color:inherit;padding:0;border:0;white-space:pre;overflow:hidden;
text-overflow:ellipsis}
.dcp-zarr .row i,.dcp-zarr summary i{flex:none;font-style:normal;text-align:right;width:72px;
white-space:nowrap;overflow:hidden;text-overflow:ellipsis;opacity:.75;
font-variant-numeric:tabular-nums}
.dcp-zarr .row b,.dcp-zarr summary b{flex:1;font-weight:400;opacity:.6}
.dcp-zarr .row .a,.dcp-zarr summary .a{width:96px}
.dcp-zarr .row .b,.dcp-zarr summary .b{width:128px}
.dcp-zarr .row .v{width:auto;flex:0 1 auto}
.dcp-zarr .head{font-size:12px;border-bottom:1px solid;align-items:baseline;border-radius:0;
border-color:color-mix(in srgb,currentColor 20%,transparent);padding-bottom:5px;margin:6px 0 3px}
.dcp-zarr input{font:inherit;color:inherit;background:transparent;width:240px;padding:2px 8px;
border:1px solid color-mix(in srgb,currentColor 35%,transparent);border-radius:4px;
margin-left:-18px}
</style>"""

# A number is sought in the brackets of folded layers too. What was folded before folds again.
_FILTER = r"""
const within=(numbers,n)=>numbers.split(',').some(run=>{const[a,b=a]=run.split('-');
return +a<=+n&&+n<=+b});
const finder=word=>{const digits=word.match(/\d+/g)||[],like=new RegExp(word
.replace(/[.*+?^${}()|[\]\\]/g,'\\$&').replace(/\d+/g,n=>`(${n}|\\[[\\d,-]+\\])`),'g');
return text=>[...text.matchAll(like)].some(found=>digits.every((n,i)=>
found[i+1]===n||within(found[i+1].slice(1,-1),n)))};
const words=this.value.toLowerCase().split(/\s+/).filter(Boolean).map(finder);
let matching=0;
const visit=(box,above)=>{let any=false;for(const line of box.children){
if(line.tagName==='SUMMARY')continue;
const folds=line.tagName==='DETAILS',head=folds?line.firstElementChild:line;
const name=above+head.querySelector('code').textContent.toLowerCase();
const text=folds?name:name+' '+head.querySelector('i').textContent.toLowerCase();
const own=words.every(found=>found(text)),below=folds&&visit(line,name+'.');
if(own&&!folds)matching++;
line.hidden=!(own||below);any=any||own||below;
if(folds&&words.length){line.dataset.was??=line.open?'1':'';line.open=below}
else if(folds&&'was'in line.dataset){line.open=!!line.dataset.was;delete line.dataset.was}
}return any};
const tree=this.closest('.dcp-zarr');visit(tree.querySelector('.lines'),'');
tree.querySelector('output').textContent=
words.length?(matching||'no')+(matching===1?' line':' lines'):'';
"""


def tree_html(root: Node, title: str) -> str:
    """Draw a tree as HTML; every name is escaped. Several may stand on one page."""
    script = escape(_FILTER.strip().replace("\n", " "))
    # The attribute of JupyterLab's keeps its shortcuts off while one types.
    box = (
        "<input type='search' placeholder='Filter, e.g. layers.3 bfloat16' aria-label='Filter' "
        f"spellcheck='false' data-lm-suppress-shortcuts='true' oninput=\"{script}\">"
    )
    head = "<i class='a'>dtype</i><i class='b'>shape</i><i>size</i><i>stored</i><i>codec</i>"
    lines = "".join(_html(root, _open_depth(root)))
    return (
        f"{_STYLE}<div class='dcp-zarr'><div><strong>{escape(title)}</strong>"
        f"<div class='row head'>{box}<b><output></output></b>{head}</div>"
        f"<div class='lines'>{lines}</div></div></div>"
    )


def _open_depth(root: Node) -> int:
    """Return how many levels can be unfolded so that not too many lines are seen; one at least."""
    level, depth, lines = root.below, 0, 0
    while level and (lines := lines + len(level)) <= _OPEN_LINES:
        level, depth = [child for node in level for child in node.below], depth + 1
    return max(depth - 1, 1)


def _html(node: Node, depth: int) -> Iterator[str]:
    for child in node.below:
        line = _line(child)
        if child.below:
            yield f"<details{' open' if depth > 0 else ''}><summary>{line}</summary>"
            yield from _html(child, depth - 1)
            yield "</details>"
        else:
            yield f"<div class='row'>{line}</div>"


def _line(node: Node) -> str:
    times = f"×{node.times}" if node.times > 1 else ""
    name = f"<code>{escape(printable(node.name))}</code><b>{times}</b>"
    rows = node.tensors()
    if not rows:
        return f"{name}<i class='v'>{escape(node.rows[0].value if node.rows else '')}</i>"
    if node.rows:
        kind = ", ".join(sorted({row.dtype for row in rows}))
        extent = " × ".join(map(str, rows[0].shape)) or "scalar"
    else:
        kind = f"{len(rows)} tensor{'' if len(rows) == 1 else 's'}"
        extent = f"{count(sum(prod(row.shape) for row in rows))} elements"
    codecs = ", ".join(sorted({row.codec for row in rows}))
    cells = [size(sum(row.nbytes for row in rows)), size(sum(row.stored_nbytes for row in rows))]
    texts = "".join(f"<i>{escape(text)}</i>" for text in [*cells, codecs])
    return f"{name}<i class='a'>{escape(kind)}</i><i class='b'>{escape(extent)}</i>{texts}"
