"""The state dicts that are saved and loaded: seeded, on the CPU, flat."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

State = dict[str, torch.Tensor]


def large(*, quick: bool = False) -> State:
    """Return 8 weights of 32 MiB: 4096 x 4096, bf16."""
    random = torch.Generator().manual_seed(1)
    shape = (256 if quick else 4096, 4096)
    return {f"model.layers.{k}.weight": _weight(shape, random) for k in range(8)}


def gpt(*, quick: bool = False) -> State:
    """Return a model like GPT-2 small with its Adam state: bf16 weights, fp32 moments, steps."""
    random = torch.Generator().manual_seed(2)
    state: State = {}
    for name, shape in _gpt_shapes(layers=1 if quick else 12, width=96 if quick else 768):
        state[f"model.{name}"] = _weight(shape, random)
        root = torch.empty(shape).log_normal_(mean=-7.0, std=1.0, generator=random)
        state[f"optim.state.{name}.step"] = torch.tensor(1000.0)
        state[f"optim.state.{name}.exp_avg"] = 1e-3 * torch.randn(shape, generator=random)
        state[f"optim.state.{name}.exp_avg_sq"] = root.square_()
    return state


def _gpt_shapes(*, layers: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "transformer.wte.weight", (50257, width)
    yield "transformer.wpe.weight", (1024, width)
    linears = {
        "attn.c_attn": (3, 1),
        "attn.c_proj": (1, 1),
        "mlp.c_fc": (4, 1),
        "mlp.c_proj": (1, 4),
    }
    for block in (f"transformer.h.{layer}" for layer in range(layers)):
        for linear, (out, into) in linears.items():
            yield f"{block}.{linear}.weight", (out * width, into * width)
            yield f"{block}.{linear}.bias", (out * width,)
        for norm in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            yield f"{block}.{norm}", (width,)
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)


def small(*, quick: bool = False) -> State:
    """Return 5,000 tensors of 1 KB to 1 MB, log-uniform, bf16 and fp32 by turns."""
    random = torch.Generator().manual_seed(3)
    sizes = np.exp(np.random.default_rng(3).uniform(np.log(1e3), np.log(1e6), 5000))
    state: State = {}
    for number, nbytes in enumerate(sizes[:100] if quick else sizes):
        dtype = (torch.bfloat16, torch.float32)[number % 2]
        columns = 64 if nbytes < 64e3 else 256
        shape = (max(round(nbytes / dtype.itemsize / columns), 1), columns)
        fqn = f"model.layers.{number // 50}.experts.{number % 50}.weight"
        state[fqn] = _weight(shape, random, dtype)
    return state


WORKLOADS: dict[str, Callable[..., State]] = {"large": large, "gpt": gpt, "small": small}


def _weight(
    shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return (0.02 * torch.randn(shape, generator=random)).to(dtype)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def check_equal(found: State, expected: State, peer: str) -> None:
    """Raise unless all tensors are equal, bit for bit."""
    for fqn, tensor in expected.items():
        if not torch.equal(octets(found[fqn]), octets(tensor)):
            raise RuntimeError(f"{peer} loaded {fqn!r} with other bits than were saved.")
