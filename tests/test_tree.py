"""The tree of names: layers that repeat fold, and a browser folds and filters it."""

from __future__ import annotations

import re
import time

import pytest

from dcp_zarr.display import Row
from dcp_zarr.pictures.tree import Tree, summary_tree
from tests.chromium import dumped


def row(fqn, shape=(2, 3), dtype="float32", value=""):
    return Row(fqn, dtype, shape, 24 if dtype else 0, 12, value, "lz4" if dtype else "")


def layers(count, *names, shape=(2, 3)):
    return [row(f"layers.{n}.{name}", shape) for n in range(count) for name in names]


def short(rows):
    return str(summary_tree(Tree(rows, "title"))).splitlines()[1:]


def test_equal_layers_are_one_line_where_all_lines_are_too_many():
    rows = layers(30, "attn.weight", "mlp.up_proj.weight")
    assert short([row("embed"), *rows]) == [
        "├── embed  float32 [2, 3] · 24 B",
        "└── layers.[0-29] ×30  60 tensors · 360 elements · 1.4 KiB",
        "    ├── attn.weight ×30  float32 [2, 3] · 720 B",
        "    └── mlp.up_proj.weight ×30  float32 [2, 3] · 720 B",
    ]
    assert len(str(Tree(rows, "title")).splitlines()) == 2 + 30 * 6


def test_a_tree_that_is_short_is_drawn_as_it_is():
    assert "folded" not in short(layers(3, "w"))
    assert len(short(layers(3, "w"))) == 7


@pytest.mark.parametrize(
    "odd",
    [
        row("layers.4.w", shape=(9,)),
        row("layers.4.w", dtype="bfloat16"),
        row("layers.4.v"),
        row("layers.4.w", dtype="", value="7"),
        row("layers.04.w"),
    ],
    ids=["shape", "dtype", "name", "object", "no number"],
)
def test_layers_that_differ_stay_apart(odd):
    rows = [odd if r.fqn == "layers.4.w" else r for r in layers(30, "w")]
    text = "\n".join(short(rows))
    assert "[0-3,5-29].w ×29  float32 [2, 3]" in text
    assert f"{odd.fqn.removeprefix('layers.')}  {odd.summary()}" in text


def test_layers_in_layers_fold_once_each():
    rows = [row(f"layers.{n}.experts.{e}.w") for n in range(8) for e in range(4)]
    assert short(rows) == ["└── layers.[0-7].experts.[0-3].w ×32  float32 [2, 3] · 768 B"]


def test_many_numbers_with_gaps_are_cut_in_text_alone():
    rows = [row(f"layers.{n}.w", (n % 3 + 1,)) for n in range(150)]
    (_, line, *_) = short(rows)
    assert re.fullmatch(
        r"    ├── \[0,3,6,[\d,]*…[\d,]*,144,147\]\.w ×50  float32 \[1\] · 1.2 KiB", line
    )
    assert "144,147].w" in Tree(rows, "title")._repr_html_()


def test_a_name_that_looks_folded_stays_beside_what_is():
    text = "\n".join(short([*layers(30, "w"), row("layers.[0-29].w", (7,))]))
    assert "[0-29].w ×30  float32 [2, 3]" in text
    assert "[0-29].w  float32 [7]" in text


def test_objects_fold_only_where_they_are_equal():
    rows = [row(f"groups.{n}.lr", dtype="", value="0.1" if n else "0.2") for n in range(30)]
    assert short(rows) == ["└── groups", "    ├── 0.lr  0.2", "    └── [1-29].lr ×29  0.1"]


def test_thousands_of_tensors_are_drawn_quickly_and_shortly():
    rows = [
        row(f"block{part}.layers.{n}.experts.{e}.w{part}", (n + 1, e + 1))
        for part in range(5) for n in range(100) for e in range(10)
    ]  # fmt: skip
    start = time.perf_counter()
    html = Tree(rows, "title")._repr_html_()
    assert time.perf_counter() - start < 1.5  # 0.15 s where nothing else runs
    assert html.count("<i class='b'>") - 1 > 5000
    assert len(html) < 1_000_000


TREE = [
    row("model.embed.weight", (50, 8), "bfloat16"),
    *layers(12, "attn.qkv.weight", "mlp.up.weight"),
    row("layers.12.odd"),
    row("step", dtype="", value="1000"),
    row("<script>alert(1)</script>"),
]


def seen(*scripts, trees=1):
    """Return what a browser shows of trees after each script: names, without their indentation."""
    told = """<script>
    const type = (text, tree = 0) => {
        const box = document.querySelectorAll('.dcp-zarr input')[tree];
        box.value = text;
        box.dispatchEvent(new Event('input', {bubbles: true}));
    };
    const click = () => document.querySelector('.lines summary').click();
    const tell = tree => {
        const seen = [...tree.querySelectorAll('.lines code')].filter(c => c.checkVisibility());
        const told = document.createElement('pre');
        told.textContent = seen.map(code => code.textContent).join('\\n');
        document.body.append(told);
    };
    """
    for script in scripts:
        told += f"{script};document.querySelectorAll('.dcp-zarr').forEach(tell);"
    dom = dumped(Tree(TREE, "title")._repr_html_() * trees + told + "</script>")
    found = re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    assert len(found) == len(scripts) * trees
    return [text.split("\n") if text else [] for text in found]


ALL = [
    "model.embed.weight", "layers", "[0-11]", "attn.qkv.weight", "mlp.up.weight", "12.odd", "step",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
]  # fmt: skip
IN_LAYERS = ["layers", "[0-11]", "attn.qkv.weight", "mlp.up.weight"]


FILTERED = {
    "": ALL,
    "qkv": ["layers", "[0-11]", "attn.qkv.weight"],
    "LAYERS.7": IN_LAYERS,
    "layers.7.mlp": ["layers", "[0-11]", "mlp.up.weight"],
    "layers.12": ["layers", "12.odd"],
    "layers.13": [],
    "[0-11].mlp": ["layers", "[0-11]", "mlp.up.weight"],
    "weight bfloat16": ["model.embed.weight"],
    "step": ["step"],
    "<script>": ["&lt;script&gt;alert(1)&lt;/script&gt;"],
    "(": [ALL[-1]],
}


@pytest.mark.slow
class TestInABrowser:
    """What a click and a keystroke do."""

    def test_the_filter_shows_the_lines_that_match_and_what_they_lie_in(self):
        found = seen(*(f"type({typed!r})" for typed in FILTERED))
        assert dict(zip(FILTERED, found, strict=True)) == FILTERED

    def test_a_click_folds_and_another_unfolds(self):
        outside = [name for name in ALL if name not in IN_LAYERS[1:] and name != "12.odd"]
        assert seen("click()", "click()") == [outside, ALL]

    def test_a_filter_that_is_cleared_leaves_the_tree_as_it_was(self):
        folded, *_, again = seen("click()", "type('qkv')", "type('mlp')", "type('')")
        assert again == folded != ALL

    def test_a_filter_is_of_one_tree_alone(self):
        assert seen("type('step', 1)", trees=2) == [ALL, ["step"]]

    def test_the_lines_that_match_are_counted(self):
        shown = "document.querySelector('.lines code').textContent = "
        shown += "document.querySelector('output').textContent"
        found = seen(f"type('weight'); {shown}", f"type('none'); {shown}; type('')")
        assert [names[0] for names in found] == ["3 lines", "no lines"]
