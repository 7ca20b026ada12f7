"""Every Python block of the README runs, in order, as one session."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
