"""``scripts/demo.py`` runs and says what it proved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "scripts" / "demo.py"
PROVED = [
    r"Saved by 2 processes: \d+ tensors and \d+ objects in \d+ files; .* ratio 0\.\d\d\.",
    r"One tensor alone: [\w.]+ was read in [\d,]+ bytes of [\d,]+\.",
    r"zarr-python reads the same bits of it\.",
    r"Resharded 2 -> 3 exactly: \d+ entries are equal bit for bit, .*",
    r"Training goes on: the next step's loss is [\d.]+ on 3 processes, [\d.]+ on 2\.",
]


@pytest.mark.slow
@pytest.mark.dist
def test_the_demo_runs_quietly_and_says_what_it_proved(tmp_path):
    command = [sys.executable, str(DEMO), str(tmp_path / "output")]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Warning" not in demo.stderr
    lines = demo.stdout.partition("What this proved:")[2].strip().splitlines()
    for line, pattern in zip(lines, PROVED, strict=True):
        assert re.fullmatch(pattern, line.strip()), line
