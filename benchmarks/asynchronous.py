"""What `async_save` costs a training loop: how long it blocks, and steps beside it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.one_process import seconds, spread
from benchmarks.peers import Peer, empty_files, memcpy_peer
from benchmarks.torch_peers import our_peer, torch_peer
from benchmarks.workloads import WORKLOADS, State, check_equal

_STEPS_ALONE = 20


class _Times(NamedTuple):
    """Seconds of one save."""

    blocking: float
    step_alone: float
    """Mean of the steps before."""
    step_beside: float
    """Mean of the steps during it."""
    save: float
    """From the call to the end."""


def _peers() -> list[Peer]:
    ours = [our_peer(compression) for compression in (None, "fast", "small")]
    return [torch_peer(), *ours, our_peer("fast", thread_count=1)]


def section(directory: Path, place: str, *, rounds: int, quick: bool) -> str:
    """Measure, and return as Markdown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads - 1, 1))
    try:
        samples, memcpy_s = _measure(directory, rounds, quick=quick)
    finally:
        torch.set_num_threads(threads)
    rows = []
    for name, times in samples.items():
        blocking, alone, _, save = (list(column) for column in zip(*times, strict=True))
        slower = median(taken.step_beside / taken.step_alone for taken in times)
        rows.append(
            f"| {name} | {spread(blocking)} | {median(blocking) / median(memcpy_s):.2f} "
            f"| {median(alone):.4f} | {slower:.2f} | {spread(save)} |\n"
        )
    return (
        f"## `gpt` by `async_save` with a kept `DefaultStager`, {place}\n\n"
        f"From the second save on. A step trains a small model on {max(threads - 1, 1)} of "
        f"{threads} threads. *slower*: the mean of the steps during a save over that of the steps "
        f"before it.\nLimit: memcpy of the state, {spread(memcpy_s)} s.\n\n"
        "| | blocks s | x memcpy | step s | slower | save s |\n|---|---|---|---|---|---|\n"
        + "".join(rows)
    )


def _measure(
    directory: Path, rounds: int, *, quick: bool
) -> tuple[dict[str, list[_Times]], list[float]]:
    state = WORKLOADS["gpt"](quick=quick)
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    peers, memcpy, step = _peers(), memcpy_peer(state), _training_step(quick=quick)
    warnings.filterwarnings("ignore", "Ignoring pin_memory", UserWarning)
    stager = DefaultStager(StagingOptions(False, False, False, False))  # noqa: FBT003
    samples: dict[str, list[_Times]] = {peer.name: [] for peer in peers}
    memcpy_s: list[float] = []
    for number in range(-1, rounds):  # the first fills the stager
        memcpy_s += [seconds(memcpy.save, state, directory)] * (number >= 0)
        for peer in peers:
            scratch = Path(mkdtemp(dir=directory))
            path = scratch / "checkpoint"
            times = _once(peer.writer(path), state, stager, step)
            peer.load(target, path)
            check_equal(target, state, peer.name)
            samples[peer.name] += [times] * (number >= 0)
            empty_files(scratch)
    stager.close()
    return samples, memcpy_s


def _once(
    writer: Any,  # noqa: ANN401
    state: State,
    stager: DefaultStager,
    step: Callable[[], float],
) -> _Times:
    os.sync()
    alone = fmean(step() for _ in range(_STEPS_ALONE))
    start = time.perf_counter()
    future = dcp.async_save(dict(state), storage_writer=writer, async_stager=stager, no_dist=True)
    blocking = time.perf_counter() - start
    beside = [step()]
    while not future.done():
        beside.append(step())
    future.result()
    return _Times(blocking, alone, fmean(beside), time.perf_counter() - start)


def _training_step(*, quick: bool) -> Callable[[], float]:
    """Return a function that trains a little model and returns the seconds that it took."""
    width = 64 if quick else 768
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, width)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    return step
