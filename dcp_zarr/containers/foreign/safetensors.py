"""Opening safetensors: one file, or a directory of them as Hugging Face saves it.

Source: the format's own page, https://huggingface.co/docs/safetensors: eight bytes of header size,
a JSON header, then the tensors' bytes in C order, little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from dcp_zarr.containers.foreign.foreign_source import ForeignSource, Placed, placed_tensor
from dcp_zarr.containers.foreign.strided import Strided, is_file_name, numbers_of_axes
from dcp_zarr.dtypes import PACKED, dtype_of
from dcp_zarr.errors import CorruptionError, FormatError, UnsupportedTensorError
from dcp_zarr.region import Region
from dcp_zarr.safetensors_format import METADATA_NAME, NAMES

if TYPE_CHECKING:
    from dcp_zarr.region import Shape

_SIZE = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The bound of the format's own library."""
_OFFSETS = "DCP_SHARDING_INFO"
"""Where torch's DCP says in a header which regions of tensors the file holds."""

TORCH_DTYPES = {name: torch_dtype for torch_dtype, name in NAMES.items()}
"""Torch's dtype for each of the format's."""


def is_safetensors(begins: bytes) -> bool:
    """Say whether a file's first nine bytes are those of safetensors."""
    return len(begins) > _SIZE.size and begins[_SIZE.size : _SIZE.size + 1] == b"{"


class Part(NamedTuple):
    """A tensor in a file, or the part of one that is in it."""

    torch_dtype: str
    """Name of its dtype."""
    place: Strided
    """Where its elements lie."""
    region: Region
    """Which part it is."""

    @property
    def lies(self) -> tuple[int, int]:
        """Its first byte in the file, and how many it has."""
        return self.place.start, self.place.span


def open_file(path: str) -> ForeignSource:
    """Open one file.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If it is not whole, or holds what cannot be read.
    """
    documents: dict[str, os.stat_result] = {}
    found = {fqn: [part] for fqn, part in _parts(path, documents).items()}
    return _source(path, found, documents)


def open_directory(path: str, names: Collection[str]) -> ForeignSource:
    """Open a directory of files: those that its index tells of, or else all.

    Parameters
    ----------
    path
        The directory.
    names
        Of the files in it.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If a file is missing or not whole, or a tensor is in two of them.
    """
    indexes = sorted(name for name in names if name.endswith(".safetensors.index.json"))
    if len(indexes) > 1:
        raise FormatError(
            f"{path!r} has several indexes ({', '.join(indexes)}); open one of its files.",
            path=path,
        )
    told = _weight_map(path, indexes[0]) if indexes else None
    files = (
        [name for name in names if name.endswith(".safetensors")] if told is None else told.values()
    )
    found: dict[str, list[Part]] = {fqn: [] for fqn in told or ()}
    documents: dict[str, os.stat_result] = {}
    for name in sorted(set(files)):
        full = os.path.join(path, name)
        if name not in names or not Path(full).is_file():
            raise CorruptionError(f"{full!r} is missing, or no file.", path=full)
        for fqn, part in _parts(full, documents).items():
            if told is None or told.get(fqn) == name:
                found.setdefault(fqn, []).append(part)
    missing = [fqn for fqn, parts in found.items() if not parts]
    if missing:
        raise CorruptionError(
            f"Tensor {missing[0]!r} is not in the file of {path!r} in which it should be, "
            f"according to {indexes[0]!r}; {len(missing)} are missing.",
            fqn=missing[0],
            path=path,
        )
    return _source(path, found, documents)


def _source(
    path: str, found: Mapping[str, list[Part]], documents: Mapping[str, os.stat_result]
) -> ForeignSource:
    entries = {fqn: _placed(fqn, parts, path) for fqn, parts in found.items()}
    return ForeignSource(path, entries, documents=documents)


def _placed(fqn: str, parts: list[Part], path: str) -> Placed:
    """Put a tensor together: where torch's DCP saved, each rank's file holds a part of it."""
    regions = [part.region for part in parts]
    begins = [region.offsets for region in regions if region.volume]
    kinds = {(part.torch_dtype, len(part.region.sizes)) for part in parts}
    if len(kinds) > 1 or len(set(begins)) < len(begins):
        raise FormatError(
            f"Tensor {fqn!r} is in several files of {path!r}, and there is no index that says "
            "which one counts: open one of the files.",
            fqn=fqn,
            path=path,
        )
    shape = tuple(map(max, zip(*(region.ends for region in regions), strict=True)))
    places = [(part.region, part.place.itself) for part in parts]
    return placed_tensor(fqn, parts[0].torch_dtype, shape, places)


def _weight_map(path: str, index: str) -> Mapping[str, str]:
    """Return the file of each tensor; files are names, not paths."""
    try:
        told = json.loads(Path(path, index).read_bytes())["weight_map"]
        if all(map(is_file_name, told.values())):
            return dict(told)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{index!r} in {path!r} is no index of safetensors: {error!r:.100}"
        ) from error
    raise FormatError(f"{index!r} in {path!r} names a file outside of the directory.", path=path)


def _parts(path: str, documents: dict[str, os.stat_result]) -> dict[str, Part]:
    with open(path, "rb") as file:
        documents[path] = os.fstat(file.fileno())
        return read_header(file, 0, documents[path].st_size, path)


def read_header(file: BinaryIO, start: int, end: int, path: str) -> dict[str, Part]:
    """Return what is in a file, in the order of their bytes.

    Parameters
    ----------
    file
        An open file.
    start, end
        Where in it the format begins and ends, in bytes.
    path
        Its path.

    Raises
    ------
    CorruptionError
        If it is not whole.
    UnsupportedTensorError
        If it holds a dtype that torch does not have.
    """
    file.seek(start)
    begins = file.read(_SIZE.size)
    nbytes = _SIZE.unpack(begins)[0] if len(begins) == _SIZE.size else 0
    first = start + _SIZE.size + nbytes
    if not 0 < nbytes <= min(_MAX_HEADER_BYTES, end - start - _SIZE.size):
        raise CorruptionError(
            f"{path!r} is no whole safetensors file: its header is cut off.", path=path
        )
    try:
        header = json.loads(file.read(nbytes), object_pairs_hook=_distinct)
        offsets = _saved_offsets(header.pop(METADATA_NAME, None) or {})
        found = {
            fqn: _part(fqn, told, offsets.get(fqn), first, path) for fqn, told in header.items()
        }
        found = dict(sorted(found.items(), key=lambda item: item[1].lies))
    except UnsupportedTensorError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise CorruptionError(
            f"The header of {path!r} is not valid safetensors: {error!r:.100}", path=path
        ) from error
    for fqn, part in found.items():
        if part.place.start != first:
            raise CorruptionError(
                f"Tensor {fqn!r} in {path!r} does not begin where the one before it ends.",
                fqn=fqn,
                path=path,
            )
        first += part.place.span
    if first != end:
        raise CorruptionError(
            f"{path!r} ends at byte {end - start}, not where its tensors do, at {first - start}: "
            "it was cut off or added to.",
            path=path,
        )
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _saved_offsets(told: Mapping[str, str]) -> dict[str, Shape]:
    """Return where parts begin in their tensors, which torch's DCP adds to a header."""
    saved = json.loads(told.get(_OFFSETS, "{}"))
    return {fqn: numbers_of_axes(of["saved_offsets"]) for fqn, of in saved.items()}


def _part(fqn: str, told: Any, offsets: Shape | None, first: int, path: str) -> Part:  # noqa: ANN401
    if told["dtype"] not in TORCH_DTYPES:
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} in {path!r} is of {told['dtype']!r:.20}, which torch has not.",
            fqn=fqn,
            path=path,
        )
    torch_dtype = TORCH_DTYPES[told["dtype"]]
    shape = numbers_of_axes(told["shape"])
    if torch_dtype in PACKED and shape:  # the format counts values, two in a byte
        shape = (*shape[:-1], shape[-1] // 2)
    begin, end = numbers_of_axes(told["data_offsets"])
    itemsize = dtype_of(torch_dtype).itemsize
    if end - begin != prod(shape) * itemsize:
        raise ValueError(f"{fqn!r} has not as many bytes as its shape says")
    place = Strided.contiguous(path, first + begin, itemsize, shape)
    region = Region.whole(shape) if offsets is None else Region(offsets, shape)
    if len(region.offsets) != len(shape):
        raise ValueError(f"{fqn!r} has other axes than its offsets")
    return Part(torch_dtype, place, region)
