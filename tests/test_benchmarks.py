"""The benchmarks run, and say of each peer what it took or that it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_quickly(folder, *arguments):
    """Return the rows of the tables: cells by the name of the peer."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--disk", str(folder), *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_one_process_measures_each_peer_and_draws_it(tmp_path):
    rows = run_quickly(tmp_path, "--workload", "moe", "--plot", str(tmp_path / "x.png"))
    assert rows["FileSystemWriter / Reader"][1] == "1.00"
    assert float(rows["dcp_zarr fast (all defaults)"][1]) > 0
    for optional in ("Orbax, its defaults, zarr3", "zarrs, Blosc LZ4, sync"):
        assert rows[optional][0].endswith("is not installed") or float(rows[optional][1]) > 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["memory", "async"])
def test_saves_beside_a_training_loop_and_their_memory_are_measured(tmp_path, workload):
    rows = run_quickly(tmp_path, "--workload", workload)
    measured = [float(rows[name][1]) for name in ("FileSystemWriter / Reader", "dcp_zarr None")]
    assert max(measured) > 0  # one of them may need no memory of its own


@pytest.mark.slow
@pytest.mark.dist
def test_a_load_by_other_ranks_than_saved_is_measured(tmp_path):
    rows = run_quickly(tmp_path, "--workload", "resharding")
    assert float(rows["dcp_zarr fast (all defaults)"][2]) > 0
