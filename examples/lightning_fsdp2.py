"""Lightning: `ModelParallelStrategy` (FSDP2, tensor parallelism) saves Zarr checkpoints.

Lightning saves by a path alone, so one line is enough: `dcp_zarr.as_default()`.

torchrun --standalone --nproc-per-node 2 examples/lightning_fsdp2.py runs/lightning --steps 100
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import dcp_zarr

BATCH = 24


def main() -> None:
    """Train from the newest checkpoint of a run, or from the start."""
    arguments = parsed()
    dcp_zarr.as_default()
    lightning.seed_everything(0)
    count = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=count,
        strategy=ModelParallelStrategy(data_parallel_size=count, tensor_parallel_size=1),
        max_steps=arguments.steps,
        callbacks=[
            ModelCheckpoint(
                arguments.run,
                "step-{step}",
                every_n_train_steps=arguments.every,
                save_top_k=-1,
                auto_insert_metric_name=False,
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps = DataLoader(range(arguments.steps), batch_size=None)
    trainer.fit(Model(), steps, ckpt_path=newest(arguments.run), weights_only=True)
    trainer.save_checkpoint(arguments.run / f"step-{trainer.global_step}.ckpt")


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint of a run."""
    whole = [path for path in run.glob("step-*.ckpt") if dcp_zarr.is_complete(path)]
    return max(whole, key=lambda path: int(path.stem.removeprefix("step-")), default=None)


class Model(lightning.LightningModule):
    """Two layers, sharded over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 64))

    def configure_model(self) -> None:
        """Shard the layers; Lightning calls it on all ranks."""
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, _: int) -> torch.Tensor:
        """Return the loss of a batch; its loader starts anew where Lightning resumes."""
        inputs = batch(self.global_step)
        loss = nn.functional.mse_loss(self.layers(inputs), inputs.roll(1, dims=1))
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {self.global_step + 1} loss {mean.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch(step: int) -> torch.Tensor:
    """Return this rank's share of the batch of a step: the same rows on any number of ranks."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 64, generator=random).chunk(dist.get_world_size())[dist.get_rank()]


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
