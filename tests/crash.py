"""Overwrites a checkpoint again and again, each time failing one operation later than before.

Run as a program: ``python -m tests.crash kill|error|rename FOLDER PATH``. After each failure the
path must hold the old checkpoint or the new one, whole, and another save must work.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections import Counter

import torch

import dcp_zarr
from dcp_zarr import commit
from tests import ranks

OTHER_ERROR = 3
OPERATIONS = [
    "pwritev",
    "fsync",
    "rename",
    "mkdir",
    "open",
    "unlink",
    "rmdir",
    "listdir",
    "replace",
    "link",
    "ftruncate",
]


def state(value):
    """Two states with other keys, shapes and grids."""
    if value == "old":
        return {"a": torch.ones(50, 40), "gone": torch.ones(3), "step": 1, "t": (1,)}
    return {"a": torch.zeros(701, 50, dtype=torch.bfloat16), "b": torch.ones(2), "step": 2}


def save(value):
    """Save as two pretend ranks, so that there are pieces and objects to stage."""
    whole = state(value)
    tensors = {k: v for k, v in whole.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in whole.items() if k not in tensors}
    halves = {k: ranks.parts(v, (2,) + (1,) * (v.ndim - 1)) for k, v in tensors.items()}
    states = [{k: v[0] for k, v in halves.items()}, {k: v[1] for k, v in halves.items()} | rest]
    options = {"compression": None, "thread_count": 1, "read_chunk_bytes": 5000}
    ranks.save(lambda: dcp_zarr.storage_writer(PATH, **options), states)


def fail_at(number, mode, code=errno.ENOSPC):
    """Have the operation of that number kill this process, or raise as on a full disk."""
    seen = 0

    def reached():
        return seen >= number

    def wrap(real):
        def operation(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == number and mode == "kill":
                os._exit(9)
            if seen == number:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))
    commit.exchange = wrap(commit.exchange)
    return reached


def attempt(number, mode):
    """Overwrite in a child process; say whether there were as many operations as that."""
    pid = os.fork()
    if pid == 0:
        reached = fail_at(number, "kill" if mode == "rename" else mode)
        if mode == "rename":
            commit.exchange = lambda *_: False
        try:
            save("new")
        except BaseException as error:  # noqa: BLE001
            if not isinstance(error, dcp_zarr.SaveError):
                os._exit(OTHER_ERROR)
        os._exit(1 if reached() else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code != OTHER_ERROR, f"the failure of operation {number} is no SaveError"
    return code != 0


def which():
    """Return which of the two states stands at the path, checking every value."""
    with dcp_zarr.open_checkpoint(PATH) as checkpoint:
        step = checkpoint.objects["step"]
    value = {1: "old", 2: "new"}[step]
    found, expected = dcp_zarr.load(PATH), state(value)
    assert found.keys() == expected.keys()
    assert all(str(found[fqn]) == str(expected[fqn]) for fqn in expected), (found, expected)
    return value


def main(mode):
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    seen: Counter = Counter()
    save("old")
    for number in range(1, 10_000):
        failed = attempt(number, mode)
        seen[which()] += 1
        if not failed:
            break
        save("new")
        assert which() == "new"
        save("old")
    assert which() == "new"
    assert os.listdir() == [PATH]
    print(f"{number} points: {seen['old']} left the old checkpoint, {seen['new']} the new one")


if __name__ == "__main__":
    MODE, FOLDER, PATH = sys.argv[1:]
    os.chdir(FOLDER)
    main(MODE)
