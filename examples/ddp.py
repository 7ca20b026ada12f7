"""DDP: train, be killed at any moment, and go on from the newest checkpoint on other processes.

torchrun --standalone --nproc-per-node 2 examples/ddp.py runs/ddp --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import dcp_zarr

BATCH = 24


def main() -> None:
    """Train from the newest checkpoint of a run, or from the start."""
    arguments = parsed()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first = load(model, optimizer, arguments.run)
    for step in range(first, arguments.steps):
        inputs, labels = batch(step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step + 1, loss)
        if (step + 1) % arguments.every == 0:
            save(model, optimizer, step + 1, arguments.run)
    save(model, optimizer, max(first, arguments.steps), arguments.run)
    dist.barrier()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, run: Path) -> None:
    """Save all that training goes on from. All ranks call it, and each writes a part."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, storage_writer=dcp_zarr.ZarrStorageWriter(run / f"step-{step}.zarr"))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint; return how many steps were made. All ranks call it."""
    paths = [path for path in run.glob("step-*.zarr") if dcp_zarr.is_complete(path)]
    if not paths:
        return 0
    path = max(paths, key=lambda path: int(path.stem.removeprefix("step-")))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, storage_reader=dcp_zarr.ZarrStorageReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the batch of a step: the same rows on any number of ranks."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 64, generator=random)
    labels = inputs[:, :8].argmax(1)
    rank, count = dist.get_rank(), dist.get_world_size()
    return inputs.chunk(count)[rank], labels.chunk(count)[rank]


def report(step: int, loss: torch.Tensor) -> None:
    """Print the loss over all ranks."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not before the model is gone: gloo could hang
