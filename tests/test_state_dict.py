"""The state dicts that torch's own functions make, save and load in part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcp_zarr
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


def resume(rank, count, flat, path):
    """Save one model and optimizer, load them into others, and compare all that they hold."""
    no_dist = not dist.is_initialized()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    source = trained(0, 0.01, spread=not no_dist)
    state = dict(zip(("model", "optimizer"), get_state_dict(*source, options=options), strict=True))
    dcp.save(state, storage_writer=dcp_zarr.storage_writer(path), no_dist=no_dist)
    other = trained(1, 0.5, spread=not no_dist)
    assert values(other[0].state_dict()) != values(source[0].state_dict())
    loaded = dict(zip(state, get_state_dict(*other, options=options), strict=True))
    dcp.load(loaded, storage_reader=dcp_zarr.storage_reader(path), no_dist=no_dist)
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
def test_a_model_and_its_optimizer_resume(flat, path):
    resume(0, 1, flat, path)


@pytest.mark.dist
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_a_model_and_its_optimizer_that_are_spread_over_ranks_resume(tmp_path, flat, path):
    processes.run(2, tmp_path, resume, flat, path)


TREE = {
    "a": [torch.tensor([0.0]), torch.tensor([1.0]), {"x": torch.tensor([2.0])}],
    "b": {"c": {"d": torch.ones(2), "e": 5}, "f": torch.zeros(0)},
    "bc": (1, 2),
}
PARTS = {
    tuple(TREE): TREE,
    "a": {"a": TREE["a"]},
    "a.0": {"a": TREE["a"][:1]},
    "b": {"b": TREE["b"]},
    "b.c": {"b": {"c": TREE["b"]["c"]}},
    "b.c.e": {"b": {"c": {"e": 5}}},
    ("a.0", "b.f", "bc"): {"a": TREE["a"][:1], "b": {"f": TREE["b"]["f"]}, "bc": (1, 2)},
    "nothing": {},
}


def save_tree(writer, *, flat):
    planner = DefaultSavePlanner(flatten_state_dict=flat)
    dcp.save(TREE, storage_writer=writer, planner=planner, no_dist=True)


def load_keys(keys, reader):
    return _load_state_dict_from_keys(
        set(keys) if isinstance(keys, tuple) else keys, storage_reader=reader
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
@pytest.mark.parametrize(("keys", "expected"), PARTS.items(), ids=[str(keys) for keys in PARTS])
def test_torch_loads_the_parts_of_a_state_dict_that_keys_name(keys, expected, path):
    save_tree(dcp_zarr.storage_writer(path), flat=True)
    assert values(load_keys(keys, dcp_zarr.storage_reader(path))) == values(expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
@pytest.mark.parametrize("keys", ["a.1", "a.2", "a.2.x"])
def test_torch_loads_later_elements_of_a_list_where_it_does_from_its_own_files(keys, path):
    """By torch 2.13 it does not: it wants the elements before them, and as objects."""
    save_tree(dcp.FileSystemWriter("torch"), flat=True)
    save_tree(dcp_zarr.storage_writer(path), flat=True)
    found = []
    for reader in (dcp.FileSystemReader("torch"), dcp_zarr.storage_reader(path)):
        try:
            found.append(values(load_keys(keys, reader)))
        except dcp.CheckpointException as error:
            found.append(str(error.failures[0][0]))
    assert found[0] == found[1]


def test_numbers_of_an_optimizers_parameters_become_text_and_can_be_numbers_again(path):
    _, optimizer = trained(0, 0.1)
    dcp_zarr.save({"optimizer": optimizer.state_dict()}, path)
    loaded = dcp_zarr.load(path)["optimizer"]
    assert list(loaded["state"]) == ["0", "1", "2"]
    loaded["state"] = {int(key): value for key, value in loaded["state"].items()}
    assert values(loaded) == values(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
@pytest.mark.skipif(
    torch.__version__.startswith("2.7."), reason="torch 2.7 wants keys, and a flattened state dict"
)
@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "whole"])
@pytest.mark.parametrize("keys", [None, tuple(TREE)], ids=["all", "each"])
def test_torch_loads_a_whole_state_dict_by_all_its_keys_or_none(keys, flat, path):
    save_tree(dcp_zarr.storage_writer(path), flat=flat)
    assert values(load_keys(keys, dcp_zarr.storage_reader(path))) == values(TREE)


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "whole"])
def test_planners_load_a_state_dict_as_they_saved_it(flat, path):
    save_tree(dcp_zarr.storage_writer(path), flat=flat)
    state = {
        "a": [torch.full((1,), 7.0), torch.full((1,), 7.0), {"x": torch.full((1,), 7.0)}],
        "b": {"c": {"d": torch.zeros(2), "e": 0}, "f": torch.zeros(0)},
        "bc": None,
    }
    # Where it copies the top level for parts that are not flattened, torch drops the objects.
    planner = DefaultLoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=flat)
    reader = dcp_zarr.storage_reader(path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert values(state) == values(TREE)
