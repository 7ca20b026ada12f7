"""Accelerate: two functions in place of `Accelerator.save_state` and `load_state`.

Accelerate's own save each rank's FSDP weights with torch's writer, which they name, and those of
DDP as one file of rank 0. These save and load either, model and optimizer, as one Zarr checkpoint.

torchrun --standalone --nproc-per-node 2 examples/accelerate_checkpoints.py runs/a --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dcp_zarr

BATCH = 24


def main() -> None:
    """Train from the newest checkpoint of a run, or from the start."""
    arguments = parsed()
    # Else a step of the scheduler is one for each process, and their number is to change.
    options = {"step_scheduler_with_optimizer": False}
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10_000)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    first = load(model, optimizer, scheduler, arguments.run)
    for step in range(first, arguments.steps):
        inputs = batch(step, accelerator)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step + 1} loss {mean:.6f}", flush=True)
        if (step + 1) % arguments.every == 0:
            save(model, optimizer, scheduler, step + 1, arguments.run)
    save(model, optimizer, scheduler, max(first, arguments.steps), arguments.run)
    accelerator.wait_for_everyone()


def save(model: nn.Module, optimizer: Any, scheduler: Any, step: int, run: Path) -> None:
    """Save all that training goes on from. All ranks call it, and each writes what it holds."""
    dcp_zarr.save(state_of(model, optimizer, scheduler, step), run / f"step-{step}.zarr")


def load(model: nn.Module, optimizer: Any, scheduler: Any, run: Path) -> int:
    """Load the newest checkpoint; return how many steps were made. All ranks call it."""
    paths = [path for path in run.glob("step-*.zarr") if dcp_zarr.is_complete(path)]
    if not paths:
        return 0
    path = max(paths, key=lambda path: int(path.stem.removeprefix("step-")))
    state = state_of(model, optimizer, scheduler, 0)
    dcp_zarr.load_into(state, path)
    set_state_dict(
        model,
        optimizer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def state_of(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds; Accelerate's optimizer has the one that torch knows."""
    model_state, optimizer_state = get_state_dict(model, optimizer.optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "step": step,
    }


def batch(step: int, accelerator: Accelerator) -> torch.Tensor:
    """Return this rank's share of the batch of a step: the same rows on any number of ranks."""
    random = torch.Generator().manual_seed(step)
    shares = torch.randn(BATCH, 64, generator=random).chunk(accelerator.num_processes)
    return shares[accelerator.process_index].to(accelerator.device)


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not before the model is gone: gloo could hang
