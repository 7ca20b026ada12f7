"""Writing one safetensors file: values stream from a container to their places in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_zarr.local_files import BackgroundSync, write_all
from dcp_zarr.region import Region
from dcp_zarr.safetensors_format import HeaderEntry, header
from dcp_zarr.value_copies import Placed, copy_values

if TYPE_CHECKING:
    from dcp_zarr.container import Source
    from dcp_zarr.schema import TensorEntry
    from dcp_zarr.tasks import Limits


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint, and its name in a file."""

    name: str
    """Its name there."""
    entry: TensorEntry
    """The tensor."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.entry.array.nbytes


def split(tensors: Iterable[NamedTensor], file_bytes: int | None) -> list[list[NamedTensor]]:
    """Part tensors, in their order, into files of at most that many bytes; None for one file.

    A tensor that is larger has a file of its own.
    """
    files: list[list[NamedTensor]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if file_bytes is not None and files[-1] and nbytes + tensor.nbytes > file_bytes:
            files.append([])
            nbytes = 0
        files[-1].append(tensor)
        nbytes += tensor.nbytes
    return files


def write_file(
    path: str | os.PathLike[str], tensors: Sequence[NamedTensor], source: Source, limits: Limits
) -> Iterator[int]:
    """Write a new file, and make it durable; yield numbers of bytes of tensors as they are written.

    Tensors of larger elements stand first, so that all are aligned.

    Raises
    ------
    CorruptionError
        If stored bytes are lost or changed.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.entry.array.itemsize)
    begin = header(
        HeaderEntry(t.name, t.entry.dtype.torch_name, t.entry.array.shape, t.nbytes)
        for t in ordered
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        sync = BackgroundSync(fd, enabled=True)
        try:
            write_all(fd, 0, [begin])
            for nbytes in copy_values(_placed(ordered, len(begin)), source, fd, limits):
                sync.wrote(nbytes)
                yield nbytes
        finally:
            sync.close()
    finally:
        os.close(fd)


def _placed(tensors: Iterable[NamedTensor], start: int) -> Iterator[Placed]:
    """Give tensors their places, one after the other."""
    for tensor in tensors:
        yield Placed(tensor.entry, Region.whole(tensor.entry.array.shape), start)
        start += tensor.nbytes
