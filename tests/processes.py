"""Real ranks: gloo processes that meet in a file."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks start from a server that has torch imported; each import anew takes seconds. The first step
# of an optimizer imports torch._dynamo.
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "dcp_zarr.api"]
multiprocessing.set_forkserver_preload(PRELOADED)


def _enter(rank, count, folder, work, arguments):
    os.chdir(folder)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / ".meet"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    # The group ends with the process. To destroy it could hang with torch 2.7, which waits, and
    # keeps the GIL, for a thread that wants the GIL to drop the tensors of the last collective.
    try:
        work(rank, count, *arguments)
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        raise


def run(count, folder, work, *arguments):
    """Run ``work(rank, count, *arguments)`` in `folder` on `count` ranks."""
    (Path(folder) / ".meet").unlink(missing_ok=True)
    mp.start_processes(
        _enter, (count, str(folder), work, arguments), nprocs=count, start_method="forkserver"
    )
