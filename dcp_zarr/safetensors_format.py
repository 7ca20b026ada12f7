"""The header of a safetensors file; no I/O.

A file is a header's length (8 bytes, little endian), the header (JSON), and the bytes of all
tensors one after the other, in C order and little endian. Source: the format's description in
the README of https://github.com/huggingface/safetensors, and its library.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dcp_zarr.dtypes import PACKED

if TYPE_CHECKING:
    from dcp_zarr.region import Shape

NAMES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""What the format calls each torch dtype that it can hold."""

METADATA_NAME = "__metadata__"
"""A name that no tensor can have."""

INDEX = "model.safetensors.index.json"
"""Name of the index of a directory of several files."""

_ALIGNMENT = 8


def is_file_of_directory(name: str) -> bool:
    """Say whether a file of a directory has a name that an export gives.

    Examples
    --------
    >>> is_file_of_directory("model-00001-of-00002.safetensors"), is_file_of_directory("a.json")
    (True, False)
    """
    return name == INDEX or bool(re.fullmatch(r"model(-\d{5,}-of-\d{5,})?\.safetensors", name))


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file."""

    name: str
    """Its name there."""
    torch_dtype: str
    """One of `NAMES`."""
    shape: Shape
    """Its shape in torch."""
    nbytes: int
    """Its bytes."""


def header(entries: Iterable[HeaderEntry]) -> bytes:
    """Return what a file of these tensors, in this order, begins with.

    Examples
    --------
    >>> json.loads(header([HeaderEntry("w", "bfloat16", (2, 3), 12)])[8:])["w"]
    {'dtype': 'BF16', 'shape': [2, 3], 'data_offsets': [0, 12]}
    """
    described: dict[str, Any] = {METADATA_NAME: {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        shape = list(entry.shape)
        if entry.torch_dtype in PACKED:  # counted by their values, two in a byte
            shape = [*shape[:-1], 2 * prod(shape[-1:])]
        described[entry.name] = {
            "dtype": NAMES[entry.torch_dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
