"""Fixtures that every test may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The machines that run this are shared: how long an example takes says nothing.
settings.register_profile("dcp_zarr", deadline=None, max_examples=60)
settings.load_profile("dcp_zarr")


collect_ignore = ["crash.py", "hdf5_reader_from_format.py", "reader_from_format.py"]  # programs


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path, monkeypatch):
    """Run each test where its relative paths harm nobody."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["x.zarr", "x.zarr.zip", "x.h5"])
def path(request):
    """Return where to save a checkpoint: one path for each container."""
    return request.param
