"""The notebooks run, and what they show is what was committed."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NUMBER = re.compile(r"\s*-?\d+(\.\d*(e[+-]?\d+)?| B\b)")
FOLDER = re.compile(r"(/[\w.-]+)+/(?=[\w.-]+\.zarr)")


def run_again(notebook, folder):
    # Sockets rather than ports, so that runs beside each other cannot meet; a socket's path must
    # be short, which that of `tmp_path` is not.
    with tempfile.TemporaryDirectory() as sockets:
        sockets_only = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, config=sockets_only, timeout=300, resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell):
    """Return what a cell shows, without pixels, temporary folders and numbers that may vary."""
    outputs = []
    for output in cell.outputs:
        parts = output.get("data") or {output.get("name", output.output_type): output.get("text")}
        for kind, text in sorted(parts.items()):
            if kind.startswith("image/"):
                outputs.append(kind)
                continue
            text = FOLDER.sub("", text)
            vary = "numbers-vary" in cell.metadata.get("tags", [])
            outputs.append((kind, NUMBER.sub(" #", text) if vary else text))
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_was_committed(path, tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    shutil.copytree(NOTEBOOKS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    committed = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    again = run_again(nbformat.read(path, as_version=4), folder)
    assert [c.execution_count for c in committed] == list(range(1, len(committed) + 1))
    for old, new in zip(committed, again, strict=True):
        assert shown(new) == shown(old), f"{path.name} is stale; run it and commit it: {old.source}"
