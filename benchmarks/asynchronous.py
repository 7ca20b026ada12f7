"""What `async_save` costs a training loop: how long it blocks, and steps beside it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import mkdtemp
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import dcp_zarr
from benchmarks.one_process import seconds, spread
from benchmarks.peers import TORCH, Peer, empty_files, memcpy_peer
from benchmarks.torch_peers import our_peer, torch_peer
from benchmarks.workloads import WORKLOADS, State, check_equal

_STEPS_ALONE = 20


@dataclass(slots=True)
class _Samples:
    blocking_s: list[float] = field(default_factory=list)
    step_alone_s: list[float] = field(default_factory=list)
    step_beside_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


_Writer = Callable[[Path], Any]


def _writers() -> dict[str, tuple[_Writer, Peer]]:
    """Return what saves, and the peer that loads what was saved."""

    def ours(compression: str | None, **options: Any) -> tuple[_Writer, Peer]:  # noqa: ANN401
        def writer(path: Path) -> Any:  # noqa: ANN401
            return dcp_zarr.storage_writer(path, compression=compression, **options)

        return writer, our_peer(compression, **options)

    return {
        TORCH: (dcp.FileSystemWriter, torch_peer()),
        **{found[1].name: found for found in map(ours, (None, "fast", "small"))},
        **{found[1].name: found for found in (ours("fast", thread_count=1),)},
    }


def section(directory: Path, place: str, *, rounds: int, quick: bool) -> str:
    """Measure, and return as Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads - 1, 1))
    try:
        samples, memcpy_s = _measure(directory, rounds, quick=quick)
    finally:
        torch.set_num_threads(threads)
    rows = [
        f"| {name} | {spread(s.blocking_s)} | {median(s.blocking_s) / median(memcpy_s):.2f} "
        f"| {median(s.step_alone_s):.4f} "
        f"| {median(map(_ratio, s.step_beside_s, s.step_alone_s)):.2f} | {spread(s.save_s)} |\n"
        for name, s in samples.items()
    ]
    return (
        f"## `gpt` by `async_save` with a kept `DefaultStager`, {place}\n\n"
        f"From the second save on. A step trains a small model on {max(threads - 1, 1)} of "
        f"{threads} threads. *slower*: the mean of the steps during a save over that of the steps "
        f"before it.\nLimit: memcpy of the state, {spread(memcpy_s)} s.\n\n"
        "| | blocks s | x memcpy | step s | slower | save s |\n|---|---|---|---|---|---|\n"
        + "".join(rows)
    )


def _ratio(beside_s: float, alone_s: float) -> float:
    return beside_s / alone_s


def _measure(
    directory: Path, rounds: int, *, quick: bool
) -> tuple[dict[str, _Samples], list[float]]:
    state = WORKLOADS["gpt"](quick=quick)
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    writers, memcpy, step = _writers(), memcpy_peer(state), _training_step(quick=quick)
    warnings.filterwarnings("ignore", "Ignoring pin_memory", UserWarning)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # noqa: FBT003
    samples, memcpy_s = {name: _Samples() for name in writers}, []
    for number in range(-1, rounds):  # the first fills the stager
        memcpy_s += [seconds(memcpy.save, state, directory)] * (number >= 0)
        for name, (writer, peer) in writers.items():
            scratch = Path(mkdtemp(dir=directory))
            path = scratch / "checkpoint"
            _once(writer(path), state, stager, step, samples[name] if number >= 0 else _Samples())
            peer.load(target, path)
            check_equal(target, state, name)
            empty_files(scratch)
    stager.close()
    return samples, memcpy_s


def _once(
    writer: Any,  # noqa: ANN401
    state: State,
    stager: DefaultStager,
    step: Callable[[], float],
    samples: _Samples,
) -> None:
    os.sync()
    samples.step_alone_s.append(fmean(step() for _ in range(_STEPS_ALONE)))
    start = time.perf_counter()
    future = dcp.async_save(dict(state), storage_writer=writer, async_stager=stager, no_dist=True)
    samples.blocking_s.append(time.perf_counter() - start)
    beside = [step()]
    while not future.done():
        beside.append(step())
    future.result()
    samples.save_s.append(time.perf_counter() - start)
    samples.step_beside_s.append(fmean(beside))


def _training_step(*, quick: bool) -> Callable[[], float]:
    """Return a function that trains a little model and returns the seconds that it took."""
    width = 64 if quick else 768
    layers = (torch.nn.Linear(width, width), torch.nn.GELU()) * 4
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, width)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    return step
