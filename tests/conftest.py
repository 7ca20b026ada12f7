"""Fixtures that every test may use."""

from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import settings

# The machines that run this are shared: how long an example takes says nothing.
settings.register_profile("dcp_zarr", deadline=None, max_examples=60)
settings.load_profile("dcp_zarr")


collect_ignore = [
    "crash.py",
    "crash_convert.py",
    "hdf5_reader_from_format.py",
    "reader_from_format.py",
]  # programs


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path, monkeypatch):
    """Run each test where its relative paths harm nobody."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["x.zarr", "x.zarr.zip", "x.h5"])
def path(request):
    """Return where to save a checkpoint: one path for each container."""
    return request.param


@pytest.fixture(scope="session")
def _s3_server():
    from tests.s3_server import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture
def s3(_s3_server, monkeypatch):
    """Return a server of S3's API, which the environment leads to."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    _s3_server.requests()
    return _s3_server


@pytest.fixture(params=["x.zarr", "x.zarr.zip", "x.h5", "s3", "obstore", "zarr"])
def place(request, tmp_path):
    """Return where to save a checkpoint, in any container: also where there are no files."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{uuid.uuid4().hex}/x.zarr"
    if request.param == "obstore":
        from obstore.store import LocalStore

        return LocalStore(tmp_path / "store", mkdir=True)
    if request.param == "zarr":
        from zarr.storage import LocalStore

        return LocalStore(tmp_path / "store")
    return request.param


@pytest.fixture
def reads(monkeypatch):
    """Note the path and the number of bytes of each read."""
    noted = []
    real_open, real_preadv, real_pread = os.open, os.preadv, os.pread

    def name(fd):
        return os.readlink(f"/proc/self/fd/{fd}").rpartition(".zarr/")[2]

    def opened(path, flags, *args, **kwargs):
        fd = real_open(path, flags, *args, **kwargs)
        if not flags & os.O_DIRECTORY:
            noted.append((name(fd), 0))
        return fd

    def preadv(fd, buffers, offset):
        got = real_preadv(fd, buffers, offset)
        noted.append((name(fd), got))
        return got

    def pread(fd, count, offset):
        got = real_pread(fd, count, offset)
        noted.append((name(fd), len(got)))
        return got

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pread", pread)
    return noted
