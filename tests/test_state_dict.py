"""The state dicts that torch's own functions make, save and load in part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from dcp_zarr import ZarrStorageReader, ZarrStorageWriter
from tests import processes


def trained(seed, lr, *, spread=False):
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    if spread:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": lr / 2}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=lr, amsgrad=True, foreach=False)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(state):
    """Return a state dict with whole copies of its tensors."""
    if isinstance(state, dict):
        return {key: values(value) for key, value in state.items()}
    if isinstance(state, list):
        return [values(value) for value in state]
    if hasattr(state, "full_tensor"):
        state = state.full_tensor()
    return state.detach().clone().tolist() if isinstance(state, torch.Tensor) else state


def resume(rank, count, flat):
    """Save one model and optimizer, load them into others, and compare all that they hold."""
    no_dist = not dist.is_initialized()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    source = trained(0, 0.01, spread=not no_dist)
    state = dict(zip(("model", "optimizer"), get_state_dict(*source, options=options), strict=True))
    dcp.save(state, storage_writer=ZarrStorageWriter("x.zarr"), no_dist=no_dist)
    other = trained(1, 0.5, spread=not no_dist)
    assert values(other[0].state_dict()) != values(source[0].state_dict())
    loaded = dict(zip(state, get_state_dict(*other, options=options), strict=True))
    dcp.load(loaded, storage_reader=ZarrStorageReader("x.zarr"), no_dist=no_dist)
    set_state_dict(
        *other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    for ours, theirs in zip(other, source, strict=True):
        assert values(ours.state_dict()) == values(theirs.state_dict())
    assert other[1].param_groups[1]["lr"] == 0.005


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_a_model_and_its_optimizer_resume(flat):
    resume(0, 1, flat)


@pytest.mark.dist
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_a_model_and_its_optimizer_that_are_spread_over_ranks_resume(tmp_path, flat):
    processes.run(2, tmp_path, resume, flat)
