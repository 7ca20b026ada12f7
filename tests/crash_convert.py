"""Converts over a checkpoint again and again, each time killed some operations later than before.

Run as a program: ``python -m tests.crash_convert FOLDER STEP FORMAT PATH [FORMAT PATH ...]``. After
each kill the path must hold the old checkpoint or the new one, whole; the next conversion must
work, and tidy up. Prints a line for each format: after how many attempts the old checkpoint stood
there, and after how many the new one.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections import Counter

import torch

import dcp_zarr
from tests.crash import fail_at


def convert(value, name, path):
    """Write one of two checkpoints over what stands at the path."""
    dcp_zarr.convert(f"{value}.zarr", path, to=name, overwrite=True, thread_count=1)


def attempt(number, name, path):
    """Convert in a child that is killed; say whether there were as many operations as that."""
    pid = os.fork()
    if pid == 0:
        reached = fail_at(number, "kill")
        convert("new", name, path)
        os._exit(1 if reached() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def which(path):
    """Return which of the two checkpoints stands at the path; all of its values are the same."""
    with dcp_zarr.open_checkpoint(path) as found:
        for value in ("old", "new"):
            with dcp_zarr.open_checkpoint(f"{value}.zarr") as expected:
                if {row.change for row in expected.diff(found)} == {"equal"}:
                    return value
    raise AssertionError("neither the old nor the new checkpoint")


def kill_everywhere(step, name, path):
    """Convert, killed at every so many operations, until a conversion comes to its end."""
    beside = sorted(os.listdir())
    for value in ("old", "new", "old"):  # what is imported on the way is imported
        convert(value, name, path)
    seen = Counter()
    for number in itertools.count(1, step):
        died = attempt(number, name, path)
        seen[which(path)] += 1
        if not died:
            break
        if seen["new"]:
            convert("old", name, path)
    convert("old", name, path)
    assert which(path) == "old"
    assert sorted(os.listdir()) == sorted([*beside, path]), os.listdir()
    print(name, seen["old"], seen["new"])


def main():
    folder, step, *formats = sys.argv[1:]
    os.chdir(folder)
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    warnings.simplefilter("ignore")
    for value, number in {"old": 1.0, "new": 2.0}.items():
        saved = {"w": torch.full((5, 4), number), value: torch.ones(3).bfloat16()}
        dcp_zarr.save(saved, f"{value}.zarr")
    for name, path in zip(formats[::2], formats[1::2], strict=True):
        kill_everywhere(int(step), name, path)


if __name__ == "__main__":
    main()
