"""Overwrites a checkpoint in a store again and again, each time killed one request later.

Run as a program: ``python -m tests.store_crash FOLDER``. Before its root is deleted the old
checkpoint stands there, then none, then the new one: never a half. A save afterwards works.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections import Counter

import torch

import dcp_zarr
from tests.crash import state
from tests.ranks import parts
from tests.ranks import save as save_ranks


def save(folder, value):
    """Save as two pretend ranks, so that there are pieces and objects to stage."""
    from obstore.store import LocalStore

    whole = state(value)
    tensors = {k: v for k, v in whole.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in whole.items() if k not in tensors}
    halves = {k: parts(v, (2,) + (1,) * (v.ndim - 1)) for k, v in tensors.items()}
    states = [{k: v[0] for k, v in halves.items()}, {k: v[1] for k, v in halves.items()} | rest]
    options = {"compression": None, "thread_count": 1, "read_chunk_bytes": 5000}
    place = LocalStore(folder, mkdir=True)
    save_ranks(lambda: dcp_zarr.storage_writer(place, **options), states)


def kill_at(number):
    """Have the request of that number kill this process: every other time when it is done."""
    import obstore

    seen = 0

    def wrap(real):
        def request(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == number:
                if number % 2:
                    real(*args, **kwargs)
                os._exit(9)
            return real(*args, **kwargs)

        return request

    for name in ("put", "get", "get_ranges", "delete", "list"):
        setattr(obstore, name, wrap(getattr(obstore, name)))


def in_child(work):
    """Do it in a child: this process never uses obstore, whose threads no fork survives."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  a child tells, and ends
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def which(folder):
    """Return which state stands there, checking every value; files are a directory's."""
    if not os.path.exists(f"{folder}/zarr.json"):
        assert not dcp_zarr.is_complete(folder)
        return "none"
    found = dcp_zarr.load(folder)
    value = {1: "old", 2: "new"}[found["step"]]
    expected = state(value)
    assert found.keys() == expected.keys()
    assert all(str(found[fqn]) == str(expected[fqn]) for fqn in expected), (found, expected)
    assert dcp_zarr.open_checkpoint(folder).verify() == []
    return value


def main(folder):
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    in_child(lambda: save(f"{folder}-old", "old"))
    seen: Counter = Counter()
    number, points, code = -2, 0, 9
    while code == 9:
        number, points = number + 3, points + 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(f"{folder}-old", folder)
        code = in_child(lambda n=number: (kill_at(n), save(folder, "new")))
        seen[which(folder)] += 1
        if code == 9:
            assert in_child(lambda: save(folder, "new")) == 0
            assert which(folder) == "new"
            assert not os.path.exists(f"{folder}/.partial/save")
    assert code == 0
    print(points, seen["old"], seen["none"], seen["new"])


if __name__ == "__main__":
    main(sys.argv[1])
