"""FSDP2 and tensor parallelism: train, be killed, and go on on a mesh of another shape.

torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp.py runs/fsdp2-tp --steps 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dcp_zarr

BATCH = 24


def main() -> None:
    """Train from the newest checkpoint of a run, or from the start."""
    arguments = parsed()
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first = load(model, optimizer, arguments.run)
    for step in range(first, arguments.steps):
        inputs = batch(step, mesh["dp"])
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step + 1, loss)
        if (step + 1) % arguments.every == 0:
            save(model, optimizer, step + 1, arguments.run)
    save(model, optimizer, max(first, arguments.steps), arguments.run)
    dist.barrier()


class Block(nn.Module):
    """A feed-forward layer that is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, run: Path) -> None:
    """Save all that training goes on from. All ranks call it, and each writes what it holds."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, storage_writer=dcp_zarr.ZarrStorageWriter(run / f"step-{step}.zarr"))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint; return how many steps were made. All ranks call it.

    Each rank reads what it holds on this mesh, whatever mesh saved it.
    """
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


def batch(step: int, dp: DeviceMesh) -> torch.Tensor:
    """Return this rank's share of the batch of a step: the same rows on a mesh of any shape."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 64, generator=random).chunk(dp.size())[dp.get_local_rank()]


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
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not before the model is gone: gloo could hang
