"""Saves at random until the time is over: states, ranks, options and faults, against a model.

Run as a program: ``python -m tests.soak MINUTES [SEED]``. The model is the state that was saved
last, and of a save that failed both are allowed. Prints what was tried, and the seed of each round
that went wrong, which ``python -m tests.soak 0 SEED`` tries again; exits with 1 then.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numcodecs
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_zarr
from dcp_zarr import SaveError, cleaning, commit
from tests import crash, processes, ranks
from tests.power_loss import Disk, materialise

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE, errno.EROFS]
SAVES = 8
"""In one round."""
REAL_EVERY = 40
"""So many rounds with pretend ranks, then one with real ones."""


def tensor(dice):
    shape = [dice.choice((0, 1, 1, 2, 3, 7, 40, 129, 701)) for _ in range(dice.randrange(4))]
    while torch.Size(shape).numel() > 1 << 18:
        shape.pop()
    made = torch.randn(shape, generator=torch.Generator().manual_seed(dice.randrange(2**31)))
    if dice.random() < 0.2:
        made = torch.zeros(shape)
    return (made * 50).to(dice.choice(DTYPES))


def state(dice):
    count = dice.choice((1, 3, 10))
    made = {f"m.{dice.choice('abc')}.{n}": tensor(dice) for n in range(count)}
    objects = [7, "text", None, [1.5, True], {"k": [1]}, (1, 2), {3, 4}, b"x" * 5000]
    return made | {f"o{n}": dice.choice(objects) for n in range(dice.randrange(3))}


def options(dice, path):
    codecs = ["fast", "small", None, numcodecs.GZip(1), numcodecs.Zstd(1), {"m": None}]
    chosen = {
        "read_chunk_bytes": dice.choice((64, 1000, 4096, 1 << 20)),
        "thread_count": dice.choice((1, 2, 5)),
        "memory_budget_bytes": dice.choice((1, 1 << 16, 1 << 28)),
        "statistics": dice.random() < 0.2,
        "dtype_encoding": dice.choice(("native", "bits")),
        "sync_files": dice.random() < 0.5,
        "compression": dice.choice(codecs),
    }
    if isinstance(chosen["compression"], dict):
        chosen["compression"] = {**chosen["compression"], "**": "fast"}
    if not path.endswith(".h5"):
        chosen["write_chunk_bytes"] = dice.choice((1 << 14, 1 << 28))
    return chosen


def of_ranks(dice, whole):
    """Give each tensor's parts, and each object, to some of a few pretend ranks."""
    count = dice.choice((1, 2, 3, 4, 6))
    states: list[dict] = [{} for _ in range(count)]
    for fqn, value in whole.items():
        if isinstance(value, torch.Tensor) and value.ndim and dice.random() < 0.7:
            axis = dice.randrange(value.ndim)
            counts = [1] * value.ndim
            counts[axis] = count
            parts = ranks.parts(value, tuple(counts))
            for rank, part in enumerate(parts):
                if part.region.volume or not rank:
                    states[rank][fqn] = part
        else:
            states[dice.randrange(count)][fqn] = value
    return states


def same(found, expected):
    """Say whether two flat state dicts have the same bits."""

    def bits(value):
        if isinstance(value, torch.Tensor):
            octets = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, octets
        return value

    return {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in expected.items()}


def found_at(path):
    try:
        with dcp_zarr.open_checkpoint(path) as checkpoint:
            assert not checkpoint.verify()
            return checkpoint.load(flat=True, weights_only=True)
    except (dcp_zarr.CheckpointNotFoundError, dcp_zarr.IncompleteCheckpointError):
        return None


class Round:
    """Saves to one path, some of which fail, and what may stand there."""

    def __init__(self, seed, folder, counts):
        self.dice, self.counts = random.Random(seed), counts
        self.path = str(Path(folder, self.dice.choice(("x.zarr", "x.zarr.zip", "x.h5"))))
        self.allowed = [None]

    def run(self):
        for _ in range(SAVES):
            whole = state(self.dice)
            states, chosen = of_ranks(self.dice, whole), options(self.dice, self.path)
            fault = self.dice.choice(
                (self._no_fault, self._no_fault, self._killed, self._killed, self._error,
                 self._error, self._lost_rank, self._power_loss)
            )  # fmt: skip
            self.counts["saves"] += 1
            fault(whole, states, chosen)
            self._check()
        self._resume()

    def _save(self, states, chosen):
        ranks.save(lambda: dcp_zarr.storage_writer(self.path, **chosen), states)

    def _no_fault(self, whole, states, chosen):
        self._save(states, chosen)
        self.allowed = [whole]
        assert not [n for n in os.listdir(Path(self.path).parent) if n.startswith(".")]

    def _in_child(self, whole, states, chosen, mode):
        number = self.dice.randrange(1, 120)
        code = self.dice.choice(ERRORS)
        no_exchange = self.dice.random() < 0.3
        pid = os.fork()
        if pid == 0:
            try:
                if no_exchange:
                    commit.exchange = lambda *_: False
                crash.fail_at(number, mode, code)
                self._save(states, chosen)
                os._exit(0)
            except SaveError:
                os._exit(1)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(3)
        came = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert came in ((0, 9) if mode == "kill" else (0, 1)), came
        self.counts["faults" if came else "faults that came too late"] += 1
        self.allowed = [*self.allowed, whole] if came else [whole]

    def _killed(self, whole, states, chosen):
        self._in_child(whole, states, chosen, "kill")

    def _error(self, whole, states, chosen):
        self._in_child(whole, states, chosen, "error")

    def _lost_rank(self, whole, states, chosen):
        """Have one rank write nothing, or have what it left be damaged."""
        writers = [dcp_zarr.storage_writer(self.path, **chosen) for _ in states]
        planners, plans, metadata = ranks.plan(writers, states)
        lost = self.dice.randrange(len(states))
        each = enumerate(zip(writers, plans, planners, strict=True))
        results = [
            writer.write_data(plan, planner).wait() if rank != lost else []
            for rank, (writer, plan, planner) in each
        ]
        self.counts["faults"] += 1
        try:
            writers[0].finish(metadata, results)
        except SaveError:
            return
        assert not plans[lost].items
        self.allowed = [whole]

    def _power_loss(self, whole, states, chosen):
        """Have the power fail at some moment of a save that syncs."""
        self.counts["faults"] += 1
        folder = Path(self.path).parent
        disk = Disk(folder)
        with disk.recorded():
            self._save(states, {**chosen, "sync_files": True})
        end = self.dice.randrange(len(disk.acts) + 1)
        left = self.dice.choice(list(disk.after_power_loss(end, self.dice)))
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        materialise(left, folder)
        self.allowed = [*self.allowed, whole] if end < len(disk.acts) else [whole]

    def _check(self):
        found = found_at(self.path)
        self.counts["loads"] += 1
        matching = [a for a in self.allowed if a is found or (a and found and same(found, a))]
        assert matching, f"what stands there is none of {len(self.allowed)} that may"
        self.allowed = matching[:1]

    def _resume(self):
        """Look as a trainer does, clean up, and load on other ranks."""
        folder, expected = Path(self.path).parent, self.allowed[0]
        assert dcp_zarr.latest(folder) == (self.path if expected is not None else None)
        cleaning.clean(folder, delete=True, idle_s=0)
        left = {n for n in os.listdir(folder) if n.startswith(".")}
        assert not left - {f".{Path(self.path).name}.old"}, left
        self._check()
        if expected is None:
            return
        wanted = {k: v for k, v in expected.items() if isinstance(v, torch.Tensor) and v.ndim}
        empty = {k: torch.zeros_like(v) for k, v in wanted.items()}
        states = of_ranks(self.dice, empty)
        parts = [{k: v for k, v in s.items() if isinstance(v, ranks.Part)} for s in states]
        ranks.load(dcp_zarr.storage_reader(self.path), parts)
        loaded = {k for s in parts for k in s}
        assert same({k: empty[k] for k in loaded}, {k: wanted[k] for k in loaded})


def on_real_ranks(rank, count, path, seed):
    """Save what is distributed at random, then again while a rank's disk fails; load it."""
    dice = random.Random(seed)
    mesh = init_device_mesh("cpu", (count,))
    stands: dict = {}
    for step in range(4):
        tensors = {k: v for k, v in state(dice).items() if isinstance(v, torch.Tensor)}
        tensors = {k: v for k, v in tensors.items() if v.dtype != torch.float8_e4m3fn}
        placed = {
            k: distribute_tensor(
                v, mesh, [Shard(dice.randrange(v.ndim)) if v.ndim else Replicate()]
            )
            for k, v in tensors.items()
        }
        broken, number = dice.randrange(count), dice.randrange(1, 30)
        real, calls = os.pwritev, itertools.count(1)

        def pwritev(*given, real=real, calls=calls, number=number):
            if next(calls) == number:
                raise OSError(errno.EIO, "Input/output error")
            return real(*given)

        os.pwritev = pwritev if rank == broken and step % 2 else real
        failed = False
        try:
            dcp_zarr.save(placed, path, read_chunk_bytes=1000)
        except SaveError:
            failed = True
        os.pwritev = real
        torch.distributed.barrier()
        stands = stands if failed else tensors
        assert same(dcp_zarr.load(path, flat=True), stands)
        torch.distributed.barrier()


def one_round(seed, counts):
    """Try one round; return what went wrong, or nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            if seed % REAL_EVERY:
                Round(seed, folder, counts).run()
            else:
                dice = random.Random(seed)
                path = dice.choice(("x.zarr", "x.zarr.zip", "x.h5"))
                processes.run(dice.choice((2, 3)), folder, on_real_ranks, path, seed)
                counts["saves"] += 4
                counts["rounds on real ranks"] += 1
        except Exception:  # noqa: BLE001  whatever it is, it is wrong
            return traceback.format_exc()
    counts["rounds"] += 1
    return ""


def main(minutes, seed):
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:  # what is imported late is not to fail
        dcp_zarr.save({"w": torch.ones(1)}, Path(folder, "x.zarr"))
        dcp_zarr.save({"w": torch.ones(1)}, Path(folder, "x.h5"))
    counts: Counter = Counter()
    wrong, end = {}, time.monotonic() + 60 * minutes
    for number in itertools.count(seed):
        if problem := one_round(number, counts):
            wrong[number] = problem
            print("SEED", number, problem, flush=True)
        if time.monotonic() >= end:
            break
    print(", ".join(f"{times} {what}" for what, times in counts.items()), flush=True)
    print(f"{len(wrong)} rounds went wrong: {list(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])))
