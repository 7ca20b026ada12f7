"""Doctests run in a temporary directory, with the package's public names at hand."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _doctest_names(request, tmp_path, monkeypatch):
    if request.node.__class__.__name__ == "DoctestItem":
        monkeypatch.chdir(tmp_path)
        import dcp_zarr

        request.node.dtest.globs.update(
            {name: getattr(dcp_zarr, name) for name in dcp_zarr.__all__}
        )
