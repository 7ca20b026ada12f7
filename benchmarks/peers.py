"""Ways to save and load a state; the machine's limits are among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crc32c import crc32c

from benchmarks.workloads import State, octets

Act = Callable[[State, Path], None]

TORCH = "FileSystemWriter / Reader"
SAFETENSORS = "safetensors, fsync / copy"
FILE = "limit: pwrite, fsync / readinto"
MEMCPY = "limit: memcpy"
_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to save a state at a path that does not exist yet, and to load it in place."""

    name: str
    save: Act
    load: Act
    package: str = ""
    """What must be installed, as Python imports it; nothing where that is a matter of course."""
    writer: Callable[[Path], Any] | None = None
    """Makes its `StorageWriter`, where DCP saves."""

    @property
    def absent(self) -> bool:
        """Whether it cannot be measured here."""
        return bool(self.package) and find_spec(self.package) is None


def limits(state: State) -> list[Peer]:
    """Return what the machine can do."""
    return [
        Peer(FILE, _file_save, _file_load),
        Peer("limit: the same on 2 threads, with crc32c", _threads_save, _threads_load),
        memcpy_peer(state),
    ]


def _file_save(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        offset = 0
        for tensor in state.values():
            offset += os.pwrite(file.fileno(), octets(tensor).numpy().data, offset)
        os.fsync(file.fileno())


def _file_load(state: State, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in state.values():
            file.readinto(octets(tensor).numpy().data)


def _threads_save(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        _on_two_threads(state, partial(os.pwrite, file.fileno()))
        os.fsync(file.fileno())


def _threads_load(state: State, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        _on_two_threads(state, lambda buffer, offset: os.preadv(fd, [buffer], offset))


def _on_two_threads(state: State, move: Callable[[memoryview, int], int]) -> None:
    """Move all tensors between memory and one file, 1 MiB at a time, and sum what was moved."""
    spans, start = [], 0
    for tensor in state.values():
        buffer = octets(tensor).numpy().data
        spans += [(buffer[i : i + _STEP], start + i) for i in range(0, len(buffer), _STEP)]
        start += len(buffer)

    def work(number: int) -> None:
        for buffer, offset in spans[len(spans) * number // 2 : len(spans) * (number + 1) // 2]:
            move(buffer, offset)
            crc32c(buffer)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def memcpy_peer(state: State) -> Peer:
    """Return copies to and from memory that is there already; the path stays empty."""
    warm = {fqn: tensor.clone() for fqn, tensor in state.items()}
    return Peer(MEMCPY, lambda state, _: copy(state, warm), lambda state, _: copy(warm, state))


def copy(source: State, target: State) -> None:
    """Copy all tensors."""
    for fqn, tensor in source.items():
        target[fqn].copy_(tensor)


def empty_files(directory: Path) -> None:
    """Free the space of all files below a directory, but keep the files.

    ext4 does not reuse inodes for minutes after they are freed, and creates files at a tenth of
    its speed while it steps over many of them: removing one checkpoint would slow the next save.
    """
    for path in [directory, *directory.rglob("*")]:
        if path.is_file():
            os.truncate(path, 0)
