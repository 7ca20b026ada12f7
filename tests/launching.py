"""Runs a training script on several processes, as torchrun does, and kills them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests import processes  # noqa: F401  tells the server what to import

PATIENCE_S = 240


def _enter(environment, folder, script, arguments):
    os.chdir(folder)
    os.environ.update(environment)
    with open(f"log-{environment['RANK']}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


class Launched:
    """The processes of a script; rank 0 prints ``step N loss X`` after each step."""

    def __init__(self, count, folder, script, *arguments):
        self._folder = Path(folder)
        for log in self._folder.glob("log-*"):
            log.unlink()
        # The parent has the store, at a port that the system chose, as torchrun's agent has.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        self._processes = []
        for rank in range(count):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_RUN_ID": "test",
            }
            process = context.Process(
                target=_enter, args=(environment, str(folder), str(script), arguments)
            )
            process.start()
            self._processes.append(process)

    def losses(self):
        """Return the loss of each step that was printed."""
        log = self._folder / "log-0"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        words = [line.split() for line in lines if line.startswith("step ") and line[-1] == "\n"]
        return {int(step): float(loss) for _, step, _, loss in words}

    def kill_after(self, step, *, when):
        """Kill all processes when a step is made and more holds; nothing in them is told of it."""
        ends = time.monotonic() + PATIENCE_S
        while step not in self.losses() or not when():
            assert all(process.is_alive() for process in self._processes), self._logs()
            assert time.monotonic() < ends, self._logs()
            time.sleep(0.01)
        for process in self._processes:
            os.kill(process.pid, signal.SIGKILL)
        assert self._codes() == [-signal.SIGKILL] * len(self._processes)
        return self.losses()

    def finish(self):
        """Wait until all is done; return the losses."""
        assert self._codes() == [0] * len(self._processes), self._logs()
        return self.losses()

    def _codes(self):
        for process in self._processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
        return [process.exitcode for process in self._processes]

    def _logs(self):
        return "\n".join(log.read_text() for log in sorted(self._folder.glob("log-*")))
