"""Pictures: what they draw is what the values are, and they are well-formed and self-contained."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import dcp_zarr
from dcp_zarr import engine
from dcp_zarr.errors import OptionError
from dcp_zarr.pictures.colours import Scale
from dcp_zarr.pictures.grids import heat_map, region_map
from dcp_zarr.pictures.histogram import histogram
from dcp_zarr.pictures.layer_map import Cell, layer_map
from dcp_zarr.pooling import pooled
from dcp_zarr.tasks import Limits
from tests import ranks
from tests.chromium import dumped

HOSTILE = "<script>alert(1)</script>\x01&\"'"
SVG = "{http://www.w3.org/2000/svg}"
RED = "#e53935"


def boxes(picture):
    """Return fill and tip of each box that has one."""
    root = ElementTree.fromstring(picture.svg)
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        if (tip := rect.find(f"{SVG}title")) is not None:
            name, _, told = tip.text.rpartition(": ")
            found[name] = rect.get("fill"), told, float(rect.get("x")), float(rect.get("y"))
    return found


def texts(picture):
    return [node.text for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def opened(state, path="x.zarr"):
    dcp_zarr.save(state, path)
    return dcp_zarr.open_checkpoint(path)


class TestLayerMap:
    """Rows are layers, columns kinds, colours numbers."""

    @staticmethod
    def state():
        torch.manual_seed(0)
        state = {
            f"model.layers.{n}.{name}.weight": torch.randn(6, 5) * (n + 1)
            for n in range(12)
            for name in ("attn", "mlp")
        }
        return {**state, "model.embed.weight": torch.randn(9, 5)}

    def test_rows_are_layers_and_columns_are_kinds(self, path):
        state = self.state()
        picture = opened(state, path).layer_map("std")
        found = boxes(picture)
        assert set(found) == set(state)
        for fqn, (_, told, *_) in found.items():
            assert float(told) == pytest.approx(state[fqn].std(correction=0).item(), rel=1e-3)
        rows = [found[f"model.layers.{n}.attn.weight"][3] for n in range(12)]
        assert rows == sorted(rows)
        assert len({found[f"model.layers.{n}.attn.weight"][2] for n in range(12)}) == 1
        assert found["model.layers.4.attn.weight"][3] == found["model.layers.4.mlp.weight"][3]
        assert {"model.layers.[0-11]", "attn.weight", "Not in layers", "11"} <= set(texts(picture))

    def test_a_column_without_a_name_has_no_label(self):
        picture = layer_map([Cell(f"state.{n}", 1.0) for n in range(2)], "title")
        assert texts(picture) == ["title", "1", "state.[0,1]", "0", "1"]

    def test_the_largest_is_yellow_and_the_smallest_is_violet(self):
        cells = [Cell(f"l.{n}.w", float(n)) for n in range(10)]
        found = boxes(layer_map(cells, "title"))
        assert (found["l.0.w"][0], found["l.9.w"][0]) == ("#440154", "#fde725")

    @pytest.mark.parametrize(
        ("quantity", "expected"), [("abs_max", 4.0), ("zeros", 0.25), ("norm", 5.0)]
    )
    def test_other_quantities(self, quantity, expected):
        with opened({"w": torch.tensor([3.0, -4.0, 0.0, -0.0]), "b": torch.zeros(1)}) as found:
            told = boxes(found.layer_map(quantity))["w"][1]
        assert float(told) == (expected if quantity != "zeros" else 0.5)

    def test_what_holds_nan_is_red_and_what_is_empty_is_grey(self):
        state = {
            "layers.0.w": torch.tensor([1.0, math.nan]),
            "layers.1.w": torch.tensor([1.0, math.inf, -math.inf]),
            "layers.2.w": torch.zeros(0),
            "layers.3.w": torch.full((2,), math.nan),
            "layers.4.w": torch.ones(2),
        }
        picture = opened(state).layer_map("abs_max")
        found = boxes(picture)
        assert [found[fqn][:2] for fqn in list(state)[:4]] == [
            (RED, "1, 1 NaN"), (RED, "1, 2 infinite"), (None, "no number"), (RED, "2 NaN")
        ]  # fmt: skip
        assert {"NaN or infinite", "no number"} <= set(texts(picture))

    def test_drift_is_the_relative_norm_of_the_difference(self, path):
        old = self.state()
        new = {fqn: value * 1.5 for fqn, value in old.items()}
        old |= {"gone": torch.ones(2), "grown": torch.zeros(2), "bad": torch.ones(1)}
        new |= {"come": torch.ones(2), "grown": torch.ones(2), "bad": torch.tensor([math.nan])}
        with opened(old, path) as first, opened(new, f"new-{path}") as second:
            found = boxes(second.layer_map("drift", first))
        assert float(found["model.layers.3.mlp.weight"][1]) == pytest.approx(0.5)
        assert found["gone"][1] == "removed float32 [2]"
        assert found["come"][1] == "added float32 [2]"
        assert found["grown"][1] == "all zero before"
        assert found["bad"][:2] == (RED, "NaN or infinite")

    @pytest.mark.parametrize(
        ("quantity", "other", "message"),
        [
            ("size", False, "no quantity 'size'; there are std, abs_max, zeros, norm, drift"),
            ("drift", False, r"from an older checkpoint: layer_map\('drift', older\)"),
            ("std", True, "'std' is of one checkpoint; only 'drift' compares"),
        ],
    )
    def test_quantities_that_do_not_go(self, quantity, other, message):
        with opened({"w": torch.ones(1)}) as one, pytest.raises(OptionError, match=message):
            one.layer_map(quantity, one if other else None)

    def test_thousands_of_tensors_are_drawn_quickly(self):
        cells = [Cell(f"layers.{n}.w{k}", n + k / 50) for n in range(125) for k in range(40)]
        start = time.perf_counter()
        picture = layer_map(cells, "title")
        assert time.perf_counter() - start < 1.5  # 0.1 s where nothing else runs
        assert len(boxes(picture)) == 5000
        assert len(picture.svg) < 1_000_000


class TestUpdateMap:
    """How large Adam's last update was."""

    def test_it_is_the_root_mean_square_of_the_update(self, path):
        torch.manual_seed(0)
        first, second = torch.randn(700, 900), torch.rand(700, 900)
        state = {"opt.layers.0.w.exp_avg": first, "opt.layers.0.w.exp_avg_sq": second}
        with opened({**state, "w": first, "b.exp_avg": first}, path) as checkpoint:
            found = boxes(checkpoint.update_map())
        expected = (first.double() / (second.double().sqrt() + 1e-8)).square().mean().sqrt()
        assert set(found) == {"opt.layers.0.w"}
        assert float(found["opt.layers.0.w"][1]) == pytest.approx(expected.item(), rel=1e-3)

    def test_what_has_no_finite_update_is_red(self):
        bad = {"w.exp_avg": torch.ones(3), "w.exp_avg_sq": torch.tensor([1.0, -1.0, math.nan])}
        found = boxes(opened(bad).update_map())
        assert found["w"][:2] == (RED, "1, 2 not finite")

    @pytest.mark.parametrize("shape", [(2,), None])
    def test_without_a_pair_it_says_so(self, shape):
        state = {"w.exp_avg": torch.ones(3)}
        if shape:
            state["w.exp_avg_sq"] = torch.ones(shape)
        message = "'x.zarr' has no moments of Adam: no pair of tensors 'X.exp_avg' and"
        with opened(state) as checkpoint, pytest.raises(OptionError, match=message):
            checkpoint.update_map()


def directly_pooled(values):
    """Return the largest absolute value of each cell, the slow way."""
    matrix = np.abs(values.reshape(len(values) if values.ndim > 1 else 1, -1))
    steps = [-(-length // 256) for length in matrix.shape]
    cut = [range(0, length, step) for length, step in zip(matrix.shape, steps, strict=True)]
    return np.array(
        [[matrix[i : i + steps[0], j : j + steps[1]].max() for j in cut[1]] for i in cut[0]]
    )


class TestHeatMap:
    """A tensor of any size as a picture of 256 x 256 cells at most."""

    @pytest.mark.parametrize(
        "shape", [(), (7,), (100_003,), (3, 5), (2111, 1301), (1, 70_000), (600, 7, 11, 13), (5, 1)]
    )
    def test_cells_hold_the_largest_absolute_value(self, shape, path):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        if len(shape) > 1 and shape[0] > 600:
            values[1500, 700] = math.nan
        dcp_zarr.save({"w": values}, path, read_chunk_bytes=65536)
        with dcp_zarr.open_checkpoint(path) as checkpoint:
            cells = pooled(checkpoint["w"]._entry, checkpoint._source, Limits.of(2))
        np.testing.assert_array_equal(cells, directly_pooled(values.double().numpy()))

    def test_boxes_that_cut_every_axis_fall_into_place(self, path):
        whole = torch.randn(40, 30, 20)
        parts = ranks.parts(whole, (2, 3, 2))
        ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": part} for part in parts])
        with dcp_zarr.open_checkpoint(path) as checkpoint:
            cells = pooled(checkpoint["w"]._entry, checkpoint._source, Limits.of(2))
        np.testing.assert_array_equal(cells, directly_pooled(whole.double().numpy()))

    def test_each_cell_is_a_pixel_and_what_is_not_finite_is_red(self):
        values = torch.arange(12.0).reshape(3, 4)
        values[1, 2], values[2, 0] = math.nan, -math.inf
        picture = opened({"w": values})["w"].heat_map()
        (encoded,) = re.findall(r'href="data:image/png;base64,([^"]+)"', picture.svg)
        image = Image.open(io.BytesIO(b64decode(encoded))).convert("RGB")
        red = (229, 57, 53)
        assert image.size == (4, 3)
        assert [image.getpixel(at) for at in [(2, 1), (0, 2)]] == [red, red]
        assert image.getpixel((0, 0)) == (68, 1, 84)
        assert image.getpixel((3, 2)) == (253, 231, 37)
        assert picture.svg.count("<circle") == 2

    def test_cells_are_never_less_than_a_pixel(self):
        picture = heat_map(np.zeros((256, 250)), (100_000, 500), "w")
        (width, height) = re.search(r'<image .*?width="(\d+)" height="(\d+)"', picture.svg).groups()
        assert (int(width) % 250, int(height) % 256) == (0, 0)
        assert "each cell stands for 391 × 2 values" in texts(picture)

    def test_memory_is_bounded(self, monkeypatch):
        dcp_zarr.save({"w": torch.zeros(4000, 3000)}, "x.zarr")
        read = []
        real = engine.ReadJob

        def noted(array, codec, region, out):
            read.append(out.nbytes)
            return real(array, codec, region, out)

        monkeypatch.setattr(engine, "ReadJob", noted)
        with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
            checkpoint["w"].heat_map()
        assert max(read) <= 8 << 20
        assert sum(read) == 4000 * 3000 * 4

    def test_a_tensor_without_elements_is_refused(self):
        with pytest.raises(OptionError, match=r"'w' of shape \(0, 3\) has no values to draw"):
            opened({"w": torch.zeros(0, 3)})["w"].heat_map()


class TestRegionMap:
    """Who wrote what."""

    def test_regions_are_boxes_in_the_order_of_the_ranks(self, path):
        whole = torch.zeros(10, 8)
        parts = ranks.parts(whole, (4, 2))
        ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": part} for part in parts])
        picture = dcp_zarr.open_checkpoint(path)["w"].region_map()
        found = boxes(picture)
        assert [told for _, told, *_ in found.values()] == [
            f"[{r}:{min(r + 3, 10)}, {c}:{c + 4}]" for r in (0, 3, 6, 9) for c in (0, 4)
        ]
        assert found["0"][0] == "#440154"
        assert found["7"][0] == "#fde725"
        assert "8 regions of 10 × 8" in texts(picture)

    @pytest.mark.parametrize(
        ("shape", "counts", "note"),
        [
            ((), (), "1 region of a scalar"),
            ((9,), (3,), "3 regions of 9"),
            ((4, 6, 5), (1, 2, 5), "10 regions of 4 × 6 × 5, axes 1 and 2"),
            ((4, 6, 5), (2, 2, 5), "20 regions of 4 × 6 × 5, axes 0 and 1"),
            ((6000, 1), (6000, 1), "6000 regions of 6000 × 1, the first 4096 are drawn"),
        ],
    )
    def test_other_numbers_of_axes(self, shape, counts, note):
        regions = [(r.offsets, r.sizes) for r in ranks.grid(shape, counts)]
        picture = region_map(regions, shape, "w")
        assert note in texts(picture)
        assert len(boxes(picture)) == min({(2, 2, 5): 4}.get(counts, math.prod(counts)), 4096)

    def test_empty_regions_keep_their_number(self):
        picture = region_map([((0,), (4,)), ((4,), (0,)), ((4,), (2,))], (6,), "w")
        assert list(boxes(picture)) == ["0", "2"]


class TestHistogram:
    """Bars over bins."""

    def test_heights_are_in_proportion_to_counts(self):
        picture = histogram(np.array([0.0, 1.0, 2.0, 3.0]), np.array([5, 0, 10]), "w", note="2 NaN")
        rects = ElementTree.fromstring(picture.svg).iter(f"{SVG}rect")
        tall = {r[0].text: float(r.get("height")) for r in rects if len(r)}
        assert tall == {"0 to 1: 5": 65, "2 to 3: 10": 130}
        assert {"w", "2 NaN", "10"} <= set(texts(picture))

    def test_heights_may_be_logarithmic(self):
        picture = histogram(np.arange(3.0), np.array([9, 99]), "w", is_log=True)
        rects = ElementTree.fromstring(picture.svg).iter(f"{SVG}rect")
        first, second = (float(r.get("height")) for r in rects if len(r))
        assert second == 2 * first

    def test_one_value_is_a_bar_in_the_middle(self):
        picture = histogram(np.array([2.0, 2.0]), np.array([70]), "w")
        (bar,) = (r for r in ElementTree.fromstring(picture.svg).iter(f"{SVG}rect") if len(r))
        (tick,) = (
            t for t in ElementTree.fromstring(picture.svg).iter(f"{SVG}text") if t.text == "2"
        )
        middle = float(bar.get("x")) + float(bar.get("width")) / 2
        assert float(bar.get("width")) > 30
        assert float(tick.get("x")) == pytest.approx(middle, abs=1)

    def test_no_value_can_be_drawn(self):
        assert histogram(np.array([0.0, 1.0]), np.array([0]), "w").svg


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], Scale(1, 3, is_log=False)),
        ([1.0, 1.0, 1.0, 100.0], Scale(1, 100, is_log=True)),
        ([0.05, 0.05, 0.05, 1.0], Scale(0.05, 1, is_log=True)),
        ([1.0, 1.0, 1.0, 10.0], Scale(1, 10, is_log=False)),
        ([0.0, 1.0, 1.0, 100.0], Scale(1, 100, is_log=True)),
        ([1e-20, 1.0, 1.0, 100.0], Scale(1e-4, 100, is_log=True)),
        ([-1.0, 100.0], Scale(-1, 100, is_log=False)),
        ([math.nan, math.inf, 2.0], Scale(2, 2, is_log=False)),
        ([], Scale(0, 0, is_log=False)),
    ],
)
def test_a_scale_is_logarithmic_where_few_are_much_larger(values, expected):
    assert Scale.of(values) == expected
    assert all(0 <= expected.share(v) <= 1 for v in [*values, 0.0] if expected.low <= v < math.inf)


def every_kind(fqn):
    grid = np.array([[1.0, math.nan]])
    yield layer_map([Cell(fqn, 1.0), Cell(f"l.0.{fqn}", None, fqn, is_bad=True)], fqn)
    yield layer_map([Cell(f"{fqn}.0.{fqn}", 1.0)], fqn)
    yield heat_map(grid, (1, 2), fqn)
    yield region_map([((0,), (3,))], (3,), fqn)
    yield histogram(np.array([0.0, 1.0]), np.array([1]), fqn, note=fqn)


def test_every_name_is_text_and_every_picture_well_formed():
    for picture in every_kind(HOSTILE):
        root = ElementTree.fromstring(picture.svg)
        assert not list(root.iter(f"{SVG}script"))
        assert "&lt;script&gt;" in picture.svg
        assert set(re.findall(r"https?://[^\"]*", picture.svg)) == {"http://www.w3.org/2000/svg"}


class TestPicture:
    """A picture as a value."""

    def test_a_long_title_is_cut_in_its_middle_and_stretches_nothing(self):
        long = "layers." + "x" * 500 + ".weight"
        picture = histogram(np.array([0.0, 1.0]), np.array([1]), long)
        (shown,) = (line for line in texts(picture) if "…" in line)
        assert (shown[:7], shown[-7:]) == ("layers.", ".weight")
        assert float(ElementTree.fromstring(picture.svg).get("width")) < 700
        assert picture.title == long

    def test_it_says_what_it_is_and_draws_itself(self):
        picture = layer_map([Cell("w", 1.0)], "Standard deviation")
        assert repr(picture).startswith("Picture 'Standard deviation': a notebook draws it; save(")
        assert picture._repr_html_().startswith("<svg ")
        with pytest.raises(AttributeError):
            picture.svg = ""

    @pytest.mark.parametrize("name", ["w.svg", "w.html"])
    def test_it_is_saved_light_and_dark(self, name, tmp_path):
        layer_map([Cell("w", 1.0)], HOSTILE).save(tmp_path / name)
        written = (tmp_path / name).read_text()
        assert "prefers-color-scheme:dark" in written
        assert "<script" not in written
        assert [file.name for file in tmp_path.iterdir()] == [name]
        if name == "w.svg":
            ElementTree.fromstring(written)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("x.zarr", "'x.zarr' does not end in .svg or .html"),
            ("folder.svg", "'folder.svg' is a directory; name a file in it"),
            ("nowhere/x.svg", "There is no directory '.*nowhere' to write into; make it"),
        ],
    )
    def test_where_it_cannot_be_saved(self, name, message, tmp_path):
        (tmp_path / "folder.svg").mkdir()
        with pytest.raises(OptionError, match=message):
            layer_map([Cell("w", 1.0)], "title").save(name)
        assert [file.name for file in tmp_path.iterdir()] == ["folder.svg"]


@pytest.mark.slow
def test_a_browser_draws_every_kind_of_picture():
    script = """<script>for (const svg of document.querySelectorAll('svg')) {
        const outer = svg.getBoundingClientRect();
        const out = [...svg.querySelectorAll('text')].filter(text => {
            const box = text.getBoundingClientRect();
            return box.left < outer.left || box.top < outer.top ||
                box.right > outer.right + 1 || box.bottom > outer.bottom + 1;
        });
        const told = document.createElement('pre');
        told.textContent = out.map(text => text.textContent).join(', ');
        document.body.append(told);
    }</script>"""
    long = "model.decoder.blocks.mixture_of_experts.gate_projection.weight"
    pictures = [*every_kind("w"), *every_kind(long)]
    found = re.findall("<pre>(.*?)</pre>", dumped("".join(p.svg for p in pictures) + script))
    assert found == [""] * len(pictures)  # no text is cut off


FIRST_PICTURE = """
import sys
sys.modules["torch"] = None
import dcp_zarr
dcp_zarr.open_checkpoint("step-1.zarr").layer_map("std").save("std.svg")
"""


def test_the_first_picture_takes_few_lines_and_no_torch():
    dcp_zarr.save({f"layers.{n}.w": torch.randn(4, 4) for n in range(3)}, "step-1.zarr")
    subprocess.run([sys.executable, "-c", FIRST_PICTURE], check=True)
    assert "layers" in Path("std.svg").read_text()
    assert len(FIRST_PICTURE.strip().splitlines()) <= 10
