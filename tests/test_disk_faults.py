"""File systems that refuse: each is an error that says what to do, and takes nothing away."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

import dcp_zarr
from dcp_zarr import SaveError, commit

FAULTS = {
    "ENOSPC": "Free space there",
    "EDQUOT": "The quota is used up",
    "EFBIG": "limit of a file's size",
    "EROFS": "mounted for writing",
    "EACCES": "right to write",
    "EPERM": "right to write",
    "EMFILE": "ulimit -n",
    "ENFILE": "open files of this machine",
    "EXDEV": "without mounts in it",
    "EIO": "Look after the disk",
}


def save(path, value):
    dcp_zarr.save({"w": torch.full((64, 64), value), "o": (1,)}, path, read_chunk_bytes=4096)


@pytest.mark.parametrize("name", ["pwritev", "fsync", "mkdir", "rename", "open"])
@pytest.mark.parametrize("code", FAULTS)
def test_a_file_system_that_refuses_is_said_in_words(path, code, name, monkeypatch):
    save(path, 1.0)
    real = getattr(os, name)

    def refuse(*given, **options):
        if name == "open" and not given[1] & os.O_CREAT:
            return real(*given, **options)
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(os, name, refuse)
    found = os.strerror(getattr(errno, code))
    message = f"The save to '{path}' was given up: .*{found}.*{FAULTS[code]}.*A checkpoint that"
    with pytest.raises(SaveError, match=message):
        save(path, 2.0)
    monkeypatch.setattr(os, name, real)
    assert (dcp_zarr.load(path)["w"] == 1).all()
    save(path, 3.0)
    assert os.listdir() == [path]


@pytest.mark.parametrize("code", ["EINVAL", "ENOSYS", "ENOTSUP", "EPERM"])
def test_a_file_system_that_exchanges_no_names_is_saved_to_all_the_same(code, monkeypatch):
    class Refusing:
        def renameat2(self, *_):
            return -1

    monkeypatch.setattr(commit.ctypes, "CDLL", lambda *_, **__: Refusing())
    monkeypatch.setattr(commit.ctypes, "get_errno", lambda: getattr(errno, code))
    save("x.zarr", 1.0)
    save("x.zarr", 2.0)
    assert (dcp_zarr.load("x.zarr")["w"] == 2).all()
    assert os.listdir() == ["x.zarr"]


@pytest.fixture
def one_more_file():
    """Let this process open one more file than it has, and no other."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = [fd for fd in range(max(taken) + 2) if fd not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[0] + 1, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_limit_of_open_files_is_named(path, one_more_file):
    with pytest.raises(SaveError, match="Too many open files.*ulimit -n"):
        save(path, 1.0)


@pytest.mark.parametrize("code", ["EACCES", "EIO", "EMFILE", "ELOOP"])
def test_a_checkpoint_that_cannot_be_opened_is_said_to_be_so(path, code, monkeypatch):
    save(path, 1.0)
    real = os.open

    def refuse(name, *given, **options):
        if str(name).endswith(path):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        return real(name, *given, **options)

    monkeypatch.setattr(os, "open", refuse)
    message = f"'{path}' cannot be opened: .*{os.strerror(getattr(errno, code))}"
    with pytest.raises(dcp_zarr.DcpZarrError, match=message):
        dcp_zarr.open_checkpoint(Path(path))
    with pytest.raises(dcp_zarr.DcpZarrError, match=message):
        dcp_zarr.storage_reader(path).read_metadata()
