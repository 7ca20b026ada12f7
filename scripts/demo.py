"""Train on 2 processes, save one Zarr checkpoint, look inside, and go on on 3 processes.

Usage: demo.py [DIRECTORY]. The checkpoint is written to DIRECTORY, by default ``demo-output``.
Every claim of the closing lines is checked; the exit status is not 0 if one does not hold.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zarr
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.tensor import DTensor

import dcp_zarr

# Spawned processes inherit the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
import training

STEPS = 40
TENSOR = "model.blocks.0.up.weight"
ROUNDING = 0.001
"""How far losses may differ because other ranks sum in another order."""


def main(directory: Path) -> None:
    """Run the demonstration and say what it proved."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{STEPS}.zarr"
    with tempfile.TemporaryDirectory() as notes:
        saved_note, loaded_note = Path(notes, "saved.json"), Path(notes, "loaded.json")
        print(f"Training {STEPS} steps on 2 processes, then saving {path} ...")
        training.run_on_ranks(2, train_and_save, str(path), saved_note)
        saved = json.loads(saved_note.read_text())
        lines = [describe_files(path), *look_inside(path, saved["digests"])]
        print("\nLoading on 3 processes, whose weights differ, and training one more step ...")
        training.run_on_ranks(3, load_and_train, str(path), loaded_note)
        lines += compare(saved, json.loads(loaded_note.read_text()))
    print("\nWhat this proved:", *lines, sep="\n  ")


def train_and_save(path: str, note: Path) -> None:
    """Train, save, and note the digest of all that was saved. All ranks call it."""
    model, optimizer = training.build()
    losses = training.train(model, optimizer, range(STEPS))
    state = training.checkpoint_state(model, optimizer, losses)
    dcp.save(state, storage_writer=dcp_zarr.ZarrStorageWriter(path))
    saved = digests(state)
    write_note(note, digests=saved, next_loss=next_loss(model, optimizer))


def load_and_train(path: str, note: Path) -> None:
    """Load into a model with other weights and train on. All ranks call it."""
    model, optimizer = training.build(seed=1)
    state = training.checkpoint_state(model, optimizer, [0.0] * STEPS)
    before = digests(state)
    dcp.load(state, storage_reader=dcp_zarr.ZarrStorageReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    # Asked of the model again: what is compared shall be what training goes on with.
    running = training.checkpoint_state(model, optimizer, state["loss"].tolist())
    loaded = digests({**running, "step": state["step"], "config": state["config"]})
    write_note(note, before=before, digests=loaded, next_loss=next_loss(model, optimizer))


def next_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train one step beyond the checkpoint; return its loss. All ranks call it."""
    return training.train(model, optimizer, range(STEPS, STEPS + 1))[0]


def look_inside(path: Path, saved: dict[str, str]) -> list[str]:
    """Open the checkpoint without a model or process group; return what that proves."""
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        print(f"\n{checkpoint}\n")
        tensor = checkpoint[TENSOR]
        before = bytes_read()
        values = tensor[...]
        read = bytes_read() - before
        print(f"{tensor}\n{TENSOR}[:2, :6] = {tensor[:2, :6]}")
        total = checkpoint.stored_nbytes
    require(digest(values) == saved[TENSOR], f"{TENSOR} is not what was saved")
    require(read < total, f"reading {TENSOR} read all {total:,} bytes")
    array = zarr.open_group(path, mode="r")[TENSOR.replace(".", "/")]
    print(f"\nzarr-python: {array.name} {array.dtype} {array.shape}, chunks {array.chunks}")
    same = np.array_equal(bits(values), array[...].view(np.uint16))
    require(same, f"zarr-python reads {TENSOR} otherwise")
    return [
        f"One tensor alone: {TENSOR} was read in {read:,} bytes of {total:,}.",
        "zarr-python reads the same bits of it.",
    ]


def describe_files(path: Path) -> str:
    """Return what the checkpoint takes on disk."""
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        raw, tensors, objects = checkpoint.nbytes, len(checkpoint), len(checkpoint.objects)
    return (
        f"Saved by 2 processes: {tensors} tensors and {objects} objects in {len(sizes)} files; "
        f"{sum(sizes):,} bytes for {raw:,} of raw tensors, ratio {sum(sizes) / raw:.2f}."
    )


def compare(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """Compare what was saved with what runs after the load; return what that proves."""
    wrong = [name for name, value in saved["digests"].items() if loaded["digests"][name] != value]
    require(not wrong and saved["digests"].keys() == loaded["digests"].keys(), f"differ: {wrong}")
    differed = sum(loaded["before"][name] != value for name, value in saved["digests"].items())
    require(differed > 0, "the load had nothing to do")
    there, here = saved["next_loss"], loaded["next_loss"]
    require(abs(there - here) < ROUNDING, f"the loss goes on as {here}, not as {there}")
    return [
        f"Resharded 2 -> 3 exactly: {len(saved['digests'])} entries are equal bit for bit, "
        f"of which {differed} differed before the load.",
        f"Training goes on: the next step's loss is {here:.4f} on 3 processes, {there:.4f} on 2.",
    ]


def digests(state: Any, name: str = "") -> dict[str, str]:  # noqa: ANN401
    """Return a digest of each entry, by its name. All ranks call it."""
    return {fqn: digest(value) for fqn, value in entries(state, name)}


def entries(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the leaves of a nested state dict and their names."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from entries(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state


def digest(value: Any) -> str:  # noqa: ANN401
    """Return a digest of a whole tensor, sharded or not; of anything else, its text."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    text = f"{whole.dtype} {tuple(whole.shape)} "
    return text + hashlib.sha256(bits(whole, np.uint8)).hexdigest()


def bits(tensor: torch.Tensor, dtype: type = np.uint16) -> np.ndarray[Any, Any]:
    """Return a tensor's bits, which compare NaN and -0.0 as they are."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(dtype)
    return flat if dtype is np.uint8 else flat.reshape(tensor.shape)


def write_note(note: Path, **values: Any) -> None:  # noqa: ANN401
    """Leave a note to the parent process; the first rank writes it."""
    if dist.get_rank() == 0:
        note.write_text(json.dumps(values))


def bytes_read() -> int:
    """Return how many bytes this process has read so far, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def require(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    """Exit with a message unless something holds."""
    if not holds:
        sys.exit(f"Demo failed: {otherwise}.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"))
