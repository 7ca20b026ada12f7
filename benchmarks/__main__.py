"""Measure, and print Markdown tables."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir, mkdtemp

import torch

from benchmarks import many_read_chunks, two_ranks
from benchmarks.peers import FILE, MEMCPY, TORCH, Act, Peer, empty_files, peers
from benchmarks.workloads import WORKLOADS, State, check_equal

_EXPLANATION = """\
Medians of interleaved rounds, the order rotated; lowest and highest in brackets. Saves to disk
are durable (every peer syncs) and begin after `sync`; loads are in place, from cached files, and
checked bit for bit. *x torch*: how many times faster than torch's own `FileSystemWriter` and
`FileSystemReader` at their defaults. *of limit*: the time that one thread needs for `pwrite` (and
`fsync`) of the same bytes to one file, or for `readinto` from it, over the time taken. Compare
rows of one table only.
"""
_NAMES = [*WORKLOADS, "two-large", "two-gpt", "chunks"]
_HEADER = """\
| | save s | x torch | of limit | load s | x torch | of limit | bytes | files |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(slots=True)
class Samples:
    """What the rounds of one peer gave."""

    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    stored_nbytes: int = 0
    files: int = 0


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with TemporaryDirectory(dir="/dev/shm") as memory, TemporaryDirectory(dir=options.disk) as disk:
        places = {"memory": Path(memory), "disk": Path(disk)}
        report = _heading(places, options)
        print(report, flush=True)
        for workload in options.workload or _NAMES:
            for place in places:
                section = _section(workload, place, places[place], options)
                print(section, flush=True)
                report += "\n" + section
                if options.output:
                    options.output.write_text(report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workload", action="append", choices=_NAMES, help="all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of tiny sizes")
    parser.add_argument("--disk", type=Path, default=Path(gettempdir()), metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def _section(workload: str, place: str, directory: Path, options: argparse.Namespace) -> str:
    if workload == "chunks":
        return many_read_chunks.section(directory, place, quick=options.quick)
    if workload.startswith("two"):
        name = workload.removeprefix("two-")
        times = two_ranks.measure(name, directory, options.rounds, quick=options.quick)
        title = f"`{name}` as Shard(0) on {two_ranks.RANKS} gloo processes, {place}"
        return f"## {title}\n\n{_two_table(times)}"
    measure(workload, WORKLOADS[workload](quick=True), directory, 1)  # warms up
    state = WORKLOADS[workload](quick=options.quick)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    samples = measure(workload, state, directory, options.rounds)
    title = f"{workload}: {len(state):,} tensors, {nbytes / 1e6:,.0f} MB, {place}"
    return f"## {title}\n\n{_table(samples, nbytes)}"


def measure(workload: str, state: State, directory: Path, rounds: int) -> dict[str, Samples]:
    """Save and load a state with all peers of its workload, again and again."""
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    contestants = peers(workload, state)
    samples = {peer.name: Samples() for peer in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for peer in contestants[first:] + contestants[:first]:
            if peer.slow and number:
                continue
            scratch = Path(mkdtemp(dir=directory))
            _once(peer, state, target, scratch / "checkpoint", samples[peer.name])
            empty_files(scratch)
    return samples


def _once(peer: Peer, state: State, target: State, path: Path, samples: Samples) -> None:
    os.sync()
    samples.save_s.append(_seconds(peer.save, state, path))
    for tensor in target.values():
        tensor.zero_()
    samples.load_s.append(_seconds(peer.load, target, path))
    check_equal(target, state, peer.name)
    files = [found for found in path.parent.rglob("*") if found.is_file()]
    samples.stored_nbytes = sum(found.stat().st_size for found in files)
    samples.files = len(files)


def _seconds(act: Act, state: State, path: Path) -> float:
    gc.collect()
    start = time.perf_counter()
    act(state, path)
    return time.perf_counter() - start


def _table(samples: dict[str, Samples], raw_nbytes: int) -> str:
    rows = []
    for name, found in samples.items():
        save = _columns({peer: s.save_s for peer, s in samples.items()}, name)
        load = _columns({peer: s.load_s for peer, s in samples.items()}, name)
        stored = f"{found.stored_nbytes / raw_nbytes:.1%} | {found.files}" if found.files else " | "
        rows.append(f"| {name} | {save} | {load} | {stored} |\n")
    return _HEADER + "".join(rows)


def _columns(times: dict[str, list[float]], name: str) -> str:
    """Return seconds, ratio to torch and fraction of the limit."""
    torch_ratio, fraction = (median(times[other]) / median(times[name]) for other in (TORCH, FILE))
    limit = "" if name == MEMCPY else f"{fraction:.2f}"
    return f"{_spread(times[name])} | {torch_ratio:.2f} | {limit}"


def _spread(times: list[float]) -> str:
    return f"{median(times):.3f} ({min(times):.3f} to {max(times):.3f})"


def _two_table(times: two_ranks.Times) -> str:
    rows = []
    for name, (save_s, load_s) in times.items():
        ratios = [
            median(times[TORCH][act]) / median(seconds)
            for act, seconds in enumerate((save_s, load_s))
        ]
        rows.append(
            f"| {name} | {_spread(save_s)} | {ratios[0]:.2f} "
            f"| {_spread(load_s)} | {ratios[1]:.2f} |\n"
        )
    return "| | save s | x torch | load s | x torch |\n|---|---|---|---|---|\n" + "".join(rows)


def _heading(places: dict[str, Path], options: argparse.Namespace) -> str:
    given = "".join(f" --workload {name}" for name in options.workload or [])
    given += " --quick" if options.quick else f" --rounds {options.rounds}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory"
    kinds = ", ".join(f"{place} is {_file_system(path)}" for place, path in places.items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("dcp_zarr", "torch", "numcodecs"))
    return (
        f"# Benchmarks\n\n`python -m benchmarks{given}`, {datetime.now(UTC):%Y-%m-%d}.\n"
        f"{machine}; {kinds}; {versions}.\n\n{_EXPLANATION}"
    )


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(inside)[1]


if __name__ == "__main__":
    main()
