"""Converts over a checkpoint again and again, each time killed some operations later than before.

Run as a program: ``python -m tests.crash_convert FORMAT PATH FOLDER STEP``. After each kill the
path must hold the old checkpoint or the new one, whole; the next conversion must work, and tidy up.
Prints how many kills there were, and after how many the old and the new checkpoint stood there.
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


def convert(value):
    """Write one of two checkpoints over what stands at the path."""
    dcp_zarr.convert(f"{value}.zarr", PATH, to=FORMAT, overwrite=True, thread_count=1)


def attempt(number):
    """Convert in a child that is killed; say whether there were as many operations as that."""
    pid = os.fork()
    if pid == 0:
        reached = fail_at(number, "kill")
        convert("new")
        os._exit(1 if reached() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def which():
    """Return which of the two checkpoints stands at the path; all of its values are the same."""
    with dcp_zarr.open_checkpoint(PATH) as found:
        for value in ("old", "new"):
            with dcp_zarr.open_checkpoint(f"{value}.zarr") as expected:
                if {row.change for row in expected.diff(found)} == {"equal"}:
                    return value
    raise AssertionError("neither the old nor the new checkpoint")


def main():
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    warnings.simplefilter("ignore")
    for value, number in {"old": 1.0, "new": 2.0}.items():
        dcp_zarr.save(
            {"w": torch.full((5, 4), number), value: torch.ones(3).bfloat16()}, f"{value}.zarr"
        )
    convert("old")
    convert("new")  # what is imported on the way is imported
    convert("old")
    seen = Counter()
    for number in itertools.count(1, STEP):
        died = attempt(number)
        seen[which()] += 1
        if not died:
            break
        if seen["new"]:
            convert("new")
            assert which() == "new"
            convert("old")
    convert("old")
    assert which() == "old"
    assert sorted(os.listdir()) == sorted(["old.zarr", "new.zarr", PATH]), os.listdir()
    print(seen.total(), seen["old"], seen["new"])


if __name__ == "__main__":
    FORMAT, PATH, FOLDER, STEP = *sys.argv[1:4], int(sys.argv[4])
    os.chdir(FOLDER)
    main()
