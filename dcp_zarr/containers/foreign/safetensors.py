"""Opening safetensors: one file, or a directory of them as Hugging Face saves it.

Source: the format's own page, https://huggingface.co/docs/safetensors: eight bytes of header size,
a JSON header, then the tensors' bytes in C order, little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from dcp_zarr.containers.foreign.foreign_source import (
    ForeignSource,
    Placed,
    identity,
    placed_tensor,
)
from dcp_zarr.containers.foreign.strided import Strided
from dcp_zarr.dtypes import PACKED, dtype_of
from dcp_zarr.errors import CorruptionError, FormatError, UnsupportedTensorError
from dcp_zarr.region import Region
from dcp_zarr.safetensors_format import METADATA_NAME, NAMES

_SIZE = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The bound of the format's own library."""
_MAX_AXES = 64

TORCH_DTYPES = {name: torch_dtype for torch_dtype, name in NAMES.items()}
"""Torch's dtype for each of the format's."""


def is_safetensors(begins: bytes) -> bool:
    """Say whether a file's first nine bytes are those of safetensors."""
    return len(begins) > _SIZE.size and begins[_SIZE.size : _SIZE.size + 1] == b"{"


def open_file(path: str) -> ForeignSource:
    """Open one file.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If it is not whole, or holds what cannot be read.
    """
    return _source(path, list(_tensors(path).values()), identity(path))


def open_directory(path: str, names: Iterable[str]) -> ForeignSource:
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
    files = sorted(name for name in names if name.endswith(".safetensors"))
    told = _weight_map(path, indexes[0]) if indexes else None
    found: dict[str, Placed] = {}
    for name in files if told is None else sorted(set(told.values())):
        full = os.path.join(path, name)
        if not Path(full).is_file():
            raise CorruptionError(
                f"{full!r} is missing, though {indexes[0]!r} names it.", path=full
            )
        for fqn, tensor in _tensors(full).items():
            if told is not None and told.get(fqn) != name:
                continue
            if fqn in found:
                raise FormatError(
                    f"Tensor {fqn!r} is in {name!r} and in another file of {path!r}, and there is "
                    f"no index that says which; open one of them, such as {full!r}.",
                    fqn=fqn,
                    path=path,
                )
            found[fqn] = tensor
    missing = [fqn for fqn in told or () if fqn not in found]
    if missing:
        raise CorruptionError(
            f"Tensor {missing[0]!r} is not in {told[missing[0]]!r} of {path!r}, though the index "  # type: ignore[index]
            f"says so; {len(missing)} are missing.",
            fqn=missing[0],
            path=path,
        )
    ordered = list(found.values()) if told is None else [found[fqn] for fqn in told]
    return _source(path, ordered, identity(os.path.join(path, indexes[0]) if indexes else path))


def _source(path: str, placed: list[Placed], save_id: str) -> ForeignSource:
    places = {tensor.entry.fqn: tensor.places for tensor in placed}
    return ForeignSource(path, [tensor.entry for tensor in placed], places, save_id=save_id)


def _weight_map(path: str, index: str) -> Mapping[str, str]:
    """Return the file of each tensor; files are names, not paths."""
    try:
        told = json.loads(Path(path, index).read_bytes())["weight_map"]
        if all(isinstance(name, str) and Path(name).name == name for name in told.values()):
            return dict(told)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{index!r} in {path!r} is no index of safetensors: {error!r:.100}"
        ) from error
    raise FormatError(f"{index!r} in {path!r} names a file outside of the directory.", path=path)


def _tensors(path: str) -> dict[str, Placed]:
    with open(path, "rb") as file:
        found = read_header(file, 0, os.fstat(file.fileno()).st_size, path)
    return {fqn: _placed(fqn, *of_tensor) for fqn, of_tensor in found.items()}


def _placed(fqn: str, torch_dtype: str, place: Strided) -> Placed:
    parts = [(Region.whole(place.shape), lambda: place)]
    return placed_tensor(fqn, torch_dtype, place.shape, parts)


def read_header(file: BinaryIO, start: int, end: int, path: str) -> dict[str, tuple[str, Strided]]:
    """Return dtype and place of each tensor, in the order of their bytes.

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
        found = {
            fqn: _tensor(fqn, told, first, path)
            for fqn, told in header.items()
            if fqn != METADATA_NAME
        }
    except UnsupportedTensorError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"The header of {path!r} is not valid safetensors: {error!r:.100}", path=path
        ) from error
    for fqn, (_, place) in found.items():
        if place.start + place.span > end:
            raise CorruptionError(
                f"{path!r} ends at byte {end - start}, before tensor {fqn!r} does: it was cut off.",
                fqn=fqn,
                path=path,
            )
    return dict(sorted(found.items(), key=lambda item: item[1][1].start))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _tensor(fqn: str, told: Any, first: int, path: str) -> tuple[str, Strided]:  # noqa: ANN401
    if told["dtype"] not in TORCH_DTYPES:
        raise UnsupportedTensorError(
            f"Tensor {fqn!r} in {path!r} is of {told['dtype']!r:.20}, which torch has not.",
            fqn=fqn,
            path=path,
        )
    torch_dtype = TORCH_DTYPES[told["dtype"]]
    shape, (begin, end) = tuple(told["shape"]), told["data_offsets"]
    if torch_dtype in PACKED and shape:  # the format counts values, two in a byte
        shape = (*shape[:-1], shape[-1] // 2)
    numbers = (*shape, begin, end)
    if len(shape) > _MAX_AXES or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{fqn!r} has no valid shape and place")
    itemsize = dtype_of(torch_dtype).itemsize
    if end - begin != prod(shape) * itemsize:
        raise ValueError(f"{fqn!r} has not as many bytes as its shape says")
    return torch_dtype, Strided.contiguous(path, first + begin, itemsize, shape)
