"""A few rounds of `scripts/soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_saves_at_random_agree_with_a_model():
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak", "0.1", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 rounds went wrong" in done.stdout
