"""torchtitan saves and finds Zarr checkpoints: its own manager, and twenty lines.

In a job of torchtitan's own, put `ZarrCheckpointManager.Config(...)` where its configuration has
``checkpoint=CheckpointManager.Config(...)``: all fields are the same. Its trainer needs a GPU; the
loop below gives its manager, its optimizers and its schedule a model on CPU:

torchrun --standalone --nproc-per-node 2 examples/torchtitan_checkpoints.py runs/titan --steps 100
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import dcp_zarr

BATCH = 24


class ZarrCheckpointManager(CheckpointManager):
    """torchtitan's manager. What torch saved in a run before is found and loaded too."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The same fields."""

    def dcp_save(self, *arguments: Any, **named: Any) -> Any:
        """Save as torchtitan does, in all its modes."""
        with dcp_zarr.as_default():
            return super().dcp_save(*arguments, **named)

    def dcp_load(self, *arguments: Any, **named: Any) -> None:
        """Load as torchtitan does."""
        with dcp_zarr.as_default():
            super().dcp_load(*arguments, **named)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step that has a whole checkpoint; torchtitan looks for torch's file."""
        paths = Path(folder or self.folder).glob("step-*")
        steps = [int(p.name.removeprefix("step-")) for p in paths if dcp_zarr.is_complete(p)]
        return max(steps, default=-1)


def main() -> None:
    """Train from the newest checkpoint of a run, or from the start."""
    arguments = parsed()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizers = default_adamw(lr=1e-3, foreach=True, fused=False).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=10, total_steps=10_000)
    train_state = TrainState()
    config = ZarrCheckpointManager.Config(
        enable=True,
        folder=str(arguments.run),
        interval=arguments.every,
        async_mode="async",
        last_save_model_only=False,
    )
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule.build(optimizers=optimizers, training_steps=arguments.steps),
        states={"train_state": train_state},
        sd_adapter=None,
    )

    checkpointer.load()
    while train_state.step < arguments.steps:
        inputs = batch(train_state.step)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        checkpointer.states["lr_scheduler"].step()
        train_state.step += 1
        report(train_state.step, loss)
        checkpointer.save(train_state.step)
    checkpointer.save(train_state.step, last_step=True)
    checkpointer.close()
    dist.barrier()


class TrainState:
    """What torchtitan's trainer keeps of itself."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.step = int(state_dict["step"])


def batch(step: int) -> torch.Tensor:
    """Return this rank's share of the batch of a step: the same rows on any number of ranks."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 64, generator=random).chunk(dist.get_world_size())[dist.get_rank()]


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
