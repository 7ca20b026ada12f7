"""Saves and loads of whole states by one process, with all peers."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import torch

from benchmarks.array_peers import array_peers
from benchmarks.peers import FILE, MEMCPY, SAFETENSORS, TORCH, Act, Peer, empty_files, limits
from benchmarks.torch_peers import (
    hugging_face_peer,
    our_peer,
    pickle_peer,
    torch_peer,
    zstd_peer,
)
from benchmarks.workloads import WORKLOADS, State, check_equal

_SLOW = 4
"""A peer that takes so many times as long as torch is measured once."""
_HEADER = """\
| | save s | x torch | of limit | load s | x torch | of limit | of safetensors | bytes | files |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(slots=True)
class Samples:
    """What the rounds of one peer gave."""

    absent: str = ""
    """The package that is not installed; the rest is then empty."""
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    stored_nbytes: int = 0
    files: int = 0


Table = dict[str, Samples]
"""Samples by peer."""


def peers(workload: str, state: State) -> list[Peer]:
    """Return the peers of a workload."""
    codecs = (None, "fast", "small")
    found = [torch_peer(), torch_peer(threads=2), zstd_peer(), hugging_face_peer(state)]
    found += [pickle_peer(), *map(our_peer, codecs)]
    found += [our_peer(compression, suffix=".zip") for compression in (None, "fast")]
    found += [our_peer(compression, suffix=".h5") for compression in codecs]
    if workload == "large":
        found += [our_peer(compression, statistics=True) for compression in (None, "fast")]
    return [*found, *array_peers(), *limits(state)]


def section(
    workload: str,
    directory: Path,
    place: str,
    *,
    rounds: int,
    quick: bool,
    names: Sequence[str] = ("",),
) -> tuple[str, Table]:
    """Measure one workload in one place; return it as Markdown, and its samples.

    Peers are torch's own storage, the limits, and those in whose name is one of `names`.
    """
    if not quick:  # warms up
        _measure(workload, WORKLOADS[workload](quick=True), directory, 1, names)
    state = WORKLOADS[workload](quick=quick)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    table = _measure(workload, state, directory, rounds, names)
    title = f"{workload}: {len(state):,} tensors, {nbytes / 1e6:,.0f} MB, {place}"
    return f"## {title}\n\n{_markdown(table, nbytes)}", table


def _measure(
    workload: str, state: State, directory: Path, rounds: int, names: Sequence[str]
) -> Table:
    """Save and load a state with the peers of its workload, again and again."""
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    wanted = (TORCH, "limit: ", *names)
    known = [peer for peer in peers(workload, state) if any(n in peer.name for n in wanted)]
    table = {peer.name: Samples(peer.package * peer.absent) for peer in known}
    contestants = [peer for peer in known if not peer.absent]
    for number in range(rounds):
        first = number % len(contestants)
        for peer in contestants[first:] + contestants[:first]:
            if number and _seconds_taken(table[peer.name]) > _SLOW * _seconds_taken(table[TORCH]):
                continue
            scratch = Path(mkdtemp(dir=directory))
            _once(peer, state, target, scratch / "checkpoint", table[peer.name])
            empty_files(scratch)
    return table


def _seconds_taken(samples: Samples) -> float:
    return samples.save_s[0] + samples.load_s[0]


def _once(peer: Peer, state: State, target: State, path: Path, samples: Samples) -> None:
    os.sync()
    samples.save_s.append(seconds(peer.save, state, path))
    for tensor in target.values():
        tensor.zero_()
    samples.load_s.append(seconds(peer.load, target, path))
    check_equal(target, state, peer.name)
    files = [found for found in path.parent.rglob("*") if found.is_file()]
    samples.stored_nbytes = sum(found.stat().st_size for found in files)
    samples.files = len(files)


def seconds(act: Act, state: State, path: Path) -> float:
    """Return what a save or a load takes."""
    gc.collect()
    start = time.perf_counter()
    act(state, path)
    return time.perf_counter() - start


def spread(times: list[float]) -> str:
    """Write a median, and between what it lies."""
    return f"{median(times):.3f} ({min(times):.3f} to {max(times):.3f})"


def _markdown(table: Table, raw_nbytes: int) -> str:
    saves = {name: samples.save_s for name, samples in table.items()}
    loads = {name: samples.load_s for name, samples in table.items()}
    rows = []
    for name, found in table.items():
        if found.absent:
            rows.append(f"| {name} | `{found.absent}` is not installed" + " |" * 9 + "\n")
            continue
        stored = f"{found.stored_nbytes / raw_nbytes:.1%} | {found.files}" if found.files else " | "
        both = f"{_columns(saves, name)} | {_columns(loads, name)}"
        rows.append(f"| {name} | {both} | {_ratio(loads, SAFETENSORS, name)} | {stored} |\n")
    return _HEADER + "".join(rows)


def _columns(times: dict[str, list[float]], name: str) -> str:
    """Return seconds, ratio to torch and fraction of the limit."""
    limit = "" if name == MEMCPY else _ratio(times, FILE, name)
    return f"{spread(times[name])} | {_ratio(times, TORCH, name)} | {limit}"


def _ratio(times: dict[str, list[float]], other: str, name: str) -> str:
    """Say how many times faster than another peer one is."""
    return f"{median(times[other]) / median(times[name]):.2f}" if times.get(other) else ""
