"""A report: one page that says what is in a checkpoint, and asks nothing of anybody."""

from __future__ import annotations

import html
import math
import os
import re
import socketserver
import threading
import time

import pytest
import torch

import dcp_zarr
from dcp_zarr import reporting
from dcp_zarr.errors import CheckpointNotFoundError, OptionError
from dcp_zarr.tensor_statistics import TensorStatistics
from tests import chromium, ranks

SCRIPT = "<script>alert(1)</script>"


def state(*, step=1000):
    torch.manual_seed(0)
    model = {"embed.weight": torch.randn(40, 8)}
    for n in range(6):
        model[f"layers.{n}.attn.weight"] = torch.randn(8, 8) * (1 + step / 1000)
        model[f"layers.{n}.mlp.weight"] = torch.randn(32, 8)
    moments = {
        f"{fqn}.{moment}": torch.rand(value.shape) + 0.1
        for fqn, value in model.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    model["embed.weight"][[3, 11]] = 0
    model["layers.2.mlp.weight"][5, 6] = math.nan
    return {"model": model, "optim": moments, "step": step, "note": "<b>", SCRIPT: torch.ones(2)}


def written(source, **options):
    dcp_zarr.report(source, "report.html", **options)
    with open("report.html") as file:
        return file.read()


def section(page, anchor):
    """Return the text of one section; an empty one is not there."""
    found = re.search(rf"<section id='{anchor}'>(.*?)</section>", page, re.DOTALL)
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", found[1])) if found else ""


def in_a_row(*words):
    return r"\s+".join(map(re.escape, words))


@pytest.fixture
def page(path):
    dcp_zarr.save(state(step=900), f"older-{path}")
    dcp_zarr.save(state(), path)
    return written(path, compared_with=f"older-{path}")


def test_it_names_the_checkpoint_and_what_it_comes_to(page, path):
    assert f"<h1>{path}</h1>" in page
    assert f"compared with older-{path}" in page
    for fact in ("<b>40</b><span>tensors", "<b>2</b><span>objects"):
        assert fact in page
    assert re.search(
        in_a_row("model", "float32", "13", "2.2 K", "8.8 KiB"), section(page, "totals")
    )


def test_health_names_nan_and_rows_of_zeros(page):
    told = section(page, "health")
    assert re.search(
        in_a_row("model.embed.weight", "[40, 8]", "2 of 40 rows are zero: 3, 11"), told
    )
    assert re.search(in_a_row("model.layers.2.mlp.weight", "[32, 8]", "1 NaN"), told)
    assert told.count("[") == 2


def test_it_draws_layers_changes_updates_histograms_values_and_regions(page):
    assert "model.layers.[0-5]" in section(page, "layers")
    assert {"Standard deviation", "Largest absolute value", "Share of zeros", "Norm"} <= {
        line.strip() for line in re.split(r"\s{2,}", section(page, "layers"))
    }
    changes = section(page, "drift")
    assert "optim" not in changes
    assert "6 of 40 tensors differ. Adam's state is left out below." in changes
    assert re.search(
        in_a_row("model.layers.0.attn.weight", "values", "float32 [8, 8]", "64"), changes
    )
    assert "optim.layers.[0-5]" in section(page, "updates")
    assert "model.embed.weight" in section(page, "histograms")
    assert "model.layers.2.mlp.weight: largest absolute values" in section(page, "heat-map")
    assert section(page, "regions") == ""
    assert re.search(in_a_row("step", "1000"), section(page, "objects"))
    assert "layers.[0-5]" in section(page, "tree")


def test_what_there_is_nothing_of_is_left_out(path):
    dcp_zarr.save({"w": torch.ones(3, 2), "empty": torch.zeros(0, 2)}, path)
    found = written(path)
    for anchor in ("updates", "objects", "drift", "regions"):
        assert section(found, anchor) == ""
    assert "No tensor holds NaN or infinity, and no matrix has rows" in section(found, "health")


@pytest.mark.parametrize(
    "values",
    [{}, {"o": 1}, {"w": torch.zeros(0)}, {"w": torch.tensor(2.0)}, {"w": torch.tensor(math.nan)},
     {"w": torch.zeros(3, 3)}, {"w": torch.ones(2, dtype=torch.complex64)},
     {"w": torch.ones(2, dtype=torch.bool)}, {"w": torch.ones(4).to(torch.float8_e4m3fn)}],
    ids=["nothing", "object", "empty", "scalar", "nan", "zeros", "complex", "bool", "float8"],
)  # fmt: skip
def test_any_checkpoint_has_a_report(values, path):
    dcp_zarr.save(values, path)
    found = written(path, compared_with=path)
    assert "equal, bit for bit" in section(found, "drift")
    assert "all values are zero" in found or "zeros" not in values


def test_matrices_of_zeros_are_named():
    dcp_zarr.save({"w": torch.zeros(3, 3), "b": torch.zeros(3)}, "x.zarr")
    assert re.search(
        in_a_row("w", "[3, 3]", "all values are zero"), section(written("x.zarr"), "health")
    )


def test_the_tensor_of_most_regions_is_drawn():
    whole = torch.randn(8, 4)
    parts = [{"w": part} for part in ranks.parts(whole, (4, 1))]
    ranks.save(lambda: dcp_zarr.storage_writer("x.zarr"), parts)
    assert "4 regions of 8 × 4" in section(written("x.zarr"), "regions")


def test_histograms_count_every_value(path):
    values = torch.randn(300_000, 20)
    dcp_zarr.save({"w": values, "b": torch.arange(7)}, path)
    found = written(path)
    pictures = re.findall(r"<svg .*?</svg>", found[found.index("id='histograms'") :])[:2]
    counts = [sum(map(int, re.findall(r" to .*?: (\d+)<", picture))) for picture in pictures]
    assert counts == [values.numel(), 7]


def test_an_open_checkpoint_stays_open(path):
    dcp_zarr.save({"w": torch.ones(3)}, path)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        written(checkpoint, compared_with=checkpoint)
        assert checkpoint["w"].numpy().sum() == 3


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x.zarr", "'x.zarr' does not end in .html"),
        ("folder.html", "'folder.html' is a directory"),
        ("nowhere/report.html", "There is no directory '.*nowhere'"),
    ],
)
def test_where_it_cannot_be_written_nothing_is_read(output, message, tmp_path, monkeypatch):
    dcp_zarr.save({"w": torch.ones(3)}, "x.zarr")
    (tmp_path / "folder.html").mkdir()
    monkeypatch.setattr(reporting, "opened", None)
    with pytest.raises(OptionError, match=message):
        dcp_zarr.report("x.zarr", output)


def test_a_report_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("before")
    with pytest.raises(CheckpointNotFoundError):
        dcp_zarr.report("nothing.zarr", "report.html")
    dcp_zarr.save({"w": torch.ones(3)}, "x.zip")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        dcp_zarr.report("x.zip", "report.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "x.zip"]
    assert (tmp_path / "report.html").read_text() == "before"


def test_names_and_values_are_text_and_no_address_is_named(page):
    assert SCRIPT not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>'" not in page
    assert set(re.findall(r"\w+://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""(?:src|href)=["'](?!#|data:image/png)""", page)
    assert "default-src 'none'" in page


@pytest.mark.slow
def test_thousands_of_tensors_are_drawn_quickly(monkeypatch):
    names = [f"model.layers.{n}.part{k}.weight" for n in range(125) for k in range(40)]
    shapes = [(n % 4 + 1, 2) for n in range(5000)]
    tensors = {name: torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
    dcp_zarr.save(tensors, "x.zarr.zip", compression=None, sync_files=False)
    rows = [
        TensorStatistics(name, "float32", shape, 8, 0, 0, 0, 0, 1, 0.5, n, n, 1, (0, 0))
        for n, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    with dcp_zarr.open_checkpoint("x.zarr.zip") as checkpoint:
        monkeypatch.setattr(checkpoint, "iter_stats", lambda: iter(rows))
        start = time.perf_counter()
        found = written(checkpoint)
        assert time.perf_counter() - start < 10  # 1 s where nothing else runs
    assert len(found) < 6_000_000


@pytest.mark.slow
@pytest.mark.parametrize("path", ["x.zarr"])
class TestInABrowser:
    """What a reader of the report meets."""

    def test_its_tree_filters_and_folds(self, page):
        script = """<script>
            const box = document.querySelector('.dcp-zarr input');
            box.value = 'layers.3.attn exp_avg_sq';
            box.dispatchEvent(new Event('input', {bubbles: true}));
            const told = document.createElement('pre');
            told.textContent = [...document.querySelectorAll('.lines code')]
                .filter(code => code.checkVisibility()).map(code => code.textContent).join(' ');
            document.body.append(told);
        </script>"""
        dom = chromium.dumped(page.replace("</body>", f"{script}</body>"))
        (seen,) = re.findall("<pre>(.*?)</pre>", dom)
        assert seen == "optim layers.[0-5] attn.weight exp_avg_sq"

    def test_it_asks_nothing_of_any_host(self, page):
        with Proxy() as asked:
            flags = [f"--proxy-server=127.0.0.1:{asked.port}", "--proxy-bypass-list=<-loopback>"]
            chromium.dumped(page, *flags)
            assert asked.lines == []
            chromium.dumped("<img src='http://example.invalid/x.png'>", *flags)
            assert asked.lines == ["GET http://example.invalid/x.png HTTP/1.1"]

    def test_it_could_not_ask_if_it_wanted_to(self, page):
        wanting = page.replace("</body>", "<img src='http://example.invalid/x.png'></body>")
        with Proxy() as asked:
            chromium.dumped(wanting, f"--proxy-server=127.0.0.1:{asked.port}")
            assert asked.lines == []


class Proxy:
    """A server that notes the first line of what it is asked.

    What the browser itself asks of its maker is not the page's; the page names no host at all.
    """

    def __enter__(self):
        self.lines = []
        noted = self.lines

        class Asked(socketserver.StreamRequestHandler):
            def handle(self):
                line = self.rfile.readline().decode().strip()
                if not re.search(r"\bgoogle(apis)?\.com\b", line):
                    noted.append(line)
                self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Asked)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
