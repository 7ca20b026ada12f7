"""How much memory saves and loads take beyond the state, each in a process of its own."""

from __future__ import annotations

import gc
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp

import torch

from benchmarks.array_peers import array_peers
from benchmarks.peers import SAFETENSORS, Peer, empty_files
from benchmarks.torch_peers import hugging_face_peer, our_peer, pickle_peer, torch_peer, zstd_peer
from benchmarks.workloads import State, check_equal, huge


def peak_nbytes() -> int:
    """Return the most memory that this process had at once since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Begin anew with what there is; return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def section(directory: Path, place: str, *, quick: bool) -> str:
    """Measure, and return as Markdown."""
    rows = []
    for number, peer in enumerate(_peers({})):
        if peer.absent:
            rows.append(f"| {peer.name} | `{peer.package}` is not installed | |\n")
            continue
        scratch = Path(mkdtemp(dir=directory))
        save, load = (_alone(number, act, scratch, quick) for act in ("save", "load"))
        empty_files(scratch)
        rows.append(f"| {peer.name} | {save / 2**20:.0f} | {load / 2**20:.0f} |\n")
    return (
        f"## Memory beyond the state: `huge`, {place}\n\nMiB at the peak, of fresh "
        "processes that saved and loaded a small state before. Pages of mapped files count.\n\n"
        "| | save | load |\n|---|---|---|\n" + "".join(rows)
    )


def _peers(state: State) -> list[Peer]:
    found = [torch_peer(), torch_peer(threads=2), zstd_peer(), hugging_face_peer(state)]
    found += [pickle_peer(), *(peer for peer in array_peers() if peer.name == SAFETENSORS)]
    found += [our_peer(compression) for compression in (None, "fast", "small")]
    found += [our_peer("fast", suffix=".zip"), our_peer("small", suffix=".h5")]
    return found


def _alone(number: int, act: str, scratch: Path, quick: bool) -> int:  # noqa: FBT001
    """Save or load in a fresh process; return the bytes that it took."""
    context = get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, number, act, scratch, quick))
    process.start()
    theirs.close()
    try:
        return int(mine.recv())
    finally:
        process.kill()
        process.join()


def _measure(
    answer: Connection,
    number: int,
    act: str,
    scratch: Path,
    quick: bool,  # noqa: FBT001
) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    little = huge(quick=True)
    warm = _peers(little)[number]
    warm.save(little, scratch / f"warm-{act}")
    warm.load(little, scratch / f"warm-{act}")
    state = huge(quick=quick)
    peer = _peers(state)[number]
    target = state
    if act == "load":
        target = {fqn: torch.ones_like(tensor) for fqn, tensor in state.items()}
    gc.collect()
    before = forget_peak()
    getattr(peer, act)(target, scratch / "checkpoint")
    nbytes = peak_nbytes() - before
    check_equal(target, state, peer.name)
    answer.send(nbytes)
