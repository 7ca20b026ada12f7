"""What a save and a load say of themselves: a line in the log, and a bar if wanted."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest
import torch

import dcp_zarr
from tests import ranks

SIZES = r"(\d+\.\d) KiB in \d+\.\d\d s \(.*B/s\), stored in (\d+\.\d) KiB \((\d+\.\d) %\)\."


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]


def test_a_save_and_a_load_are_a_line_each_with_bytes_seconds_rate_and_ratio(path, caplog):
    state = {"a": torch.randn(64, 64), "b": torch.randn(1024), "step": 3}
    with caplog.at_level(logging.INFO, "dcp_zarr"):
        dcp_zarr.save(state, path)
        dcp_zarr.load_into(state, path)
    saved, loaded = lines(caplog)
    found = re.fullmatch(f"Saved {path}: 2 tensors, {SIZES}", saved)
    again = re.fullmatch(f"Loaded from {path} on this rank: {SIZES}", loaded)
    assert float(found[1]) == float(again[1]) == 20
    assert found[2] == again[2]
    assert float(found[3]) == pytest.approx(100 * float(found[2]) / 20, abs=0.3)


def test_of_a_part_the_line_says_the_part(caplog):
    dcp_zarr.save({"a": torch.zeros(64, 64), "b": torch.zeros(1024)}, "x.zarr", compression=None)
    with caplog.at_level(logging.INFO, "dcp_zarr"):
        dcp_zarr.load_into({"b": torch.ones(1024)}, "x.zarr", strict=False)
    assert lines(caplog)[0].startswith("Loaded from x.zarr on this rank: 4.0 KiB in")


def test_ranks_but_the_coordinator_are_silent(path, caplog):
    halves = ranks.parts(torch.zeros(64, 64), (2, 1))
    with caplog.at_level(logging.INFO, "dcp_zarr"):
        ranks.save(lambda: dcp_zarr.storage_writer(path), [{"w": half} for half in halves])
        ranks.load(dcp_zarr.storage_reader(path), [{"w": half} for half in halves])
    saved, loaded = lines(caplog)
    assert "1 tensors, 16.0 KiB" in saved
    assert "8.0 KiB" in loaded


PROGRAM = """
import torch, dcp_zarr
state = {{"w": torch.zeros(512, 512), "v": torch.zeros(9)}}
dcp_zarr.save(state, {path!r}, progress={progress})
dcp_zarr.load_into(state, {path!r}, progress={progress})
"""


def errors_shown(path, *, progress, terminal):
    """Return what a program writes to standard error."""
    program = textwrap.dedent(PROGRAM.format(path=path, progress=progress))
    command = [sys.executable, "-W", "ignore", "-c", program]
    if not terminal:
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    subprocess.run(command, stderr=theirs, check=True)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the end
        pass
    os.close(ours)
    return shown.decode()


def test_a_bar_is_shown_on_a_terminal_if_wanted(path):
    shown = errors_shown(path, progress=True, terminal=True)
    assert "saving" in shown
    assert "loading" in shown
    assert "100%" in shown
    assert "1.0/1.0 MB" in shown


@pytest.mark.parametrize(("progress", "terminal"), [(True, False), (False, True)])
def test_no_bar_is_shown_elsewhere_or_unasked(progress, terminal):
    assert errors_shown("x.zarr", progress=progress, terminal=terminal) == ""
