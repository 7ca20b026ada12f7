"""A small transformer that learns how walkers move on a ring, trained by FSDP2 on CPU processes.

The notebooks and ``scripts/demo.py`` share it. It is a file because a process that a notebook
spawns cannot import from the notebook's cells.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import dcp_zarr

PLACES = 64
"""Places on the ring; the walker's place is the token."""
CONTEXT = 48
"""Places that the model sees at most."""
WIDTH = 192
HEADS = 4
DEPTH = 3
WALKS = 24
"""Walks in a batch, over all ranks; 2, 3 and 4 ranks share them evenly."""


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class RingModel(nn.Module):
    """A transformer over the places of a ring: float32 outside, bfloat16 in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(PLACES, WIDTH)
        self.time = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block().to(torch.bfloat16) for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, PLACES, bias=False)
        for weight in (self.place.weight, self.time.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, places: Tensor) -> Tensor:
        """Return the logits of each next place, of shape (walks, steps, PLACES)."""
        x = self.place(places) + self.time.weight[: places.shape[1]]
        for block in self.blocks:
            x = block(x.to(torch.bfloat16)).float()
        return self.head(self.norm(x))


def build(seed: int = 0) -> tuple[RingModel, torch.optim.AdamW]:
    """Return the model, sharded over all ranks, and its optimizer."""
    torch.manual_seed(seed)
    model = RingModel()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


def random_walks(step: int) -> Tensor:
    """Return the walks of the batch of a step, of shape (WALKS, CONTEXT + 1).

    Each walker keeps a pace of -3 to 3 places and stumbles by one place or none. Who knows the
    pace has three equally likely guesses left, which is a loss of ln 3 = 1.10.
    """
    random = torch.Generator().manual_seed(step)
    start = torch.randint(PLACES, (WALKS, 1), generator=random)
    pace = torch.randint(-3, 4, (WALKS, 1), generator=random)
    stumbles = torch.randint(-1, 2, (WALKS, CONTEXT + 1), generator=random)
    return (start + (pace + stumbles).cumsum(1)) % PLACES


def rank_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss on this rank's share of a batch, in nats."""
    walks = random_walks(step).chunk(dist.get_world_size())[dist.get_rank()]
    return functional.cross_entropy(model(walks[:, :-1]).flatten(0, 1), walks[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train for some steps; return the loss of each, over all ranks."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = rank_loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a value that each rank has one of. All ranks call it."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> dict[str, Any]:
    """Return everything that a checkpoint holds. All ranks call it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "loss": torch.tensor(losses),
        "step": len(losses),
        "config": {"places": PLACES, "width": WIDTH, "depth": DEPTH, "task": "walks on a ring"},
    }


def train_and_save(path: str, steps: int) -> None:
    """Train, and save one checkpoint. All ranks call it."""
    model, optimizer = build()
    losses = train(model, optimizer, range(steps))
    state = checkpoint_state(model, optimizer, losses)
    dcp.save(state, storage_writer=dcp_zarr.ZarrStorageWriter(path))


def train_and_save_run(pattern: str, steps: int, every: int, slip: int) -> None:
    """Train, and save a checkpoint every so many steps. All ranks call it.

    Parameters
    ----------
    pattern
        Path of each, with ``{step}`` in it.
    steps, every
        How many steps in all, and from one checkpoint to the next.
    slip
        A step for which the learning rate is 30 times what it should be.
    """
    model, optimizer = build()
    losses: list[float] = []
    rate = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 30 * rate if step == slip else rate
        losses += train(model, optimizer, range(step, step + 1))
        if (step + 1) % every == 0:
            writer = dcp_zarr.ZarrStorageWriter(pattern.format(step=step + 1), statistics=True)
            dcp.save(checkpoint_state(model, optimizer, losses), storage_writer=writer)


def load_and_compare(path: str) -> None:
    """Load into a model that is sharded over these ranks, and compare. All ranks call it.

    Each writes what it holds of the head, which is one tensor, into a file of its own.
    """
    model, _ = build(seed=1)
    dcp_zarr.load_into(model, path, "model")
    saved = dcp_zarr.load(path, "model", flat=True)
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor.full_tensor(), saved[f"model.{name}"]):
            raise ValueError(f"{name} is not what was saved.")
    rank, held = dist.get_rank(), tuple(model.head.weight.to_local().shape)
    Path(f"rank-{rank}.txt").write_text(f"rank {rank} holds {held} of head.weight; all is equal")


def run_on_ranks(ranks: int, function: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
    """Call a function on so many gloo processes, which meet through a file."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_rank, (ranks, os.path.join(directory, "meet"), function, arguments), nprocs=ranks)


def _rank(
    rank: int, ranks: int, meeting: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        function(*arguments)
        # Under FSDP2 gloo's threads outlive the group, and one that still holds a tensor while
        # Python ends aborts the process (pytorch/pytorch#190489): let them come to rest.
        dist.barrier()
    finally:
        dist.destroy_process_group()
