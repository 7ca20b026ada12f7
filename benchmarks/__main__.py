"""Measure, and print Markdown tables; draw what one process did."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import benchmarks
from benchmarks import (
    asynchronous,
    many_read_chunks,
    memory,
    one_process,
    planning,
    plot,
    ranks,
)

_EXPLANATION = """\
Medians of interleaved rounds, the order rotated; lowest and highest in brackets; what takes 4 times
as long as torch is measured once. Saves to disk are durable (every peer syncs) and begin after
`sync`; loads are in place, from cached files, and checked bit for bit. *x torch*: how many times
faster than torch's own `FileSystemWriter` and `FileSystemReader` at their defaults. *of limit*:
the time that one thread needs for `pwrite` (and `fsync`) of the same bytes to one file, or for
`readinto` from it, over the time taken. *of safetensors*: the same with its load and a copy.
Compare rows of one table only.
"""
_MAIN = ("large", "gpt", "moe", "huge", "real", "two-large", "two-gpt")
_OTHERS = ("uneven", "resharding", "async", "memory", "chunks", "planning")
_LARGE = {"gpt", "moe", "huge", "two-gpt", "async", "resharding"}
_ON_DISK_ONLY = {"uneven", "resharding", "async", "memory", "planning"}


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    set_forkserver_preload(["benchmarks.__main__"])  # processes start from one that has imported it
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with TemporaryDirectory(dir="/dev/shm") as fast, TemporaryDirectory(dir=options.disk) as disk:
        places = {"memory": Path(fast), "disk": Path(disk)}
        report = _heading(places, options)
        print(report, flush=True)
        tables: dict[str, dict[str, one_process.Table]] = {place: {} for place in places}
        for workload in options.workload or _MAIN:
            for place in options.place or (["disk"] if options.quick else places):
                for section in _sections(workload, place, places[place], options, tables[place]):
                    print(section, flush=True)
                    report += "\n" + section
                    if options.output:
                        options.output.write_text(report)
    drawn = tables["disk"] or tables["memory"]
    if options.plot and drawn:
        plot.draw(drawn, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    named = f"{', '.join(_MAIN)} by default; or {', '.join(_OTHERS)}"
    parser.add_argument(
        "--workload", action="append", choices=_MAIN + _OTHERS, metavar="NAME", help=named
    )
    parser.add_argument(
        "--place", action="append", choices=("memory", "disk"), help="both by default"
    )
    parser.add_argument(
        "--peer", action="append", metavar="NAME", help="in one process: whose names hold it"
    )
    parser.add_argument("--rounds", type=int, help="5 by default; 3 for large states")
    parser.add_argument("--quick", action="store_true", help="one round of tiny sizes, on disk")
    parser.add_argument("--disk", type=Path, default=Path(gettempdir()), metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="of one process, on disk")
    return parser.parse_args()


def _sections(
    workload: str,
    place: str,
    directory: Path,
    options: argparse.Namespace,
    tables: dict[str, one_process.Table],
) -> Iterator[str]:
    """Measure one workload in one place; yield Markdown."""
    quick = options.quick
    rounds = 1 if quick else options.rounds or (3 if workload in _LARGE else 5)
    if workload in _ON_DISK_ONLY and place != "disk":
        return
    if workload == "chunks":
        yield many_read_chunks.section(directory, place, quick=quick)
    elif workload == "planning":
        yield planning.section(directory, quick=quick)
    elif workload == "memory":
        yield memory.section(directory, place, quick=quick)
    elif workload == "async":
        yield asynchronous.section(directory, place, rounds=rounds, quick=quick)
    elif workload == "resharding":
        yield ranks.resharding(directory, place, rounds=rounds, quick=quick)
    elif workload == "uneven":
        for count in (3, 5, 7):
            yield ranks.section("third", count, directory, place, rounds=rounds, quick=quick)
    elif workload.startswith("two"):
        name = workload.removeprefix("two-")
        yield ranks.section(name, 2, directory, place, rounds=rounds, quick=quick)
    else:
        section, tables[workload] = one_process.section(
            workload,
            directory,
            place,
            rounds=rounds,
            quick=quick,
            names=options.peer or [""],
        )
        yield section


def _heading(places: dict[str, Path], options: argparse.Namespace) -> str:
    given = "".join(f" --workload {name}" for name in options.workload or [])
    given += "".join(f" --place {place}" for place in options.place or [])
    given += "".join(f" --peer {peer}" for peer in options.peer or [])
    given += " --quick" * options.quick + f" --rounds {options.rounds}" * bool(options.rounds)
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
