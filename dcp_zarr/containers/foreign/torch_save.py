"""Opening a file of ``torch.save``: a state dict, nested or not, as DCP would name its entries."""

from __future__ import annotations

import io
import os
import reprlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from dcp_zarr.containers.foreign import torch_files
from dcp_zarr.containers.foreign.foreign_source import (
    ForeignSource,
    Place,
    identity,
    placed_tensor,
)
from dcp_zarr.containers.foreign.pickles import TorchName, described
from dcp_zarr.containers.foreign.torch_files import SavedTensor, TorchFile
from dcp_zarr.errors import FormatError
from dcp_zarr.region import Region
from dcp_zarr.schema import Entry, Keys, ObjectEntry

_SINGLE = frozenset((type(None), bool, int, float, complex, str, bytes))
_PLAIN = _SINGLE | {list, tuple, dict, OrderedDict, set, frozenset}
"""Types whose values are told without torch."""
_MAX_DEPTH = 64
_MAX_INTEGER_BITS = 4096
_VISITS = 1 << 16
"""Values that may be visited, besides one for each byte of the file: they may share and loop."""


def open_file(path: str) -> ForeignSource:
    """Open a file of ``torch.save``; a tensor alone is called ``tensor``.

    Raises
    ------
    CorruptionError, FormatError
        If it is not whole, or holds no state dict.
    """
    with open(path, "rb", buffering=0) as raw:
        nbytes = os.fstat(raw.fileno()).st_size
        file = torch_files.read(raw, path)
    root = {"tensor": file.root} if isinstance(file.root, SavedTensor) else file.root
    if not isinstance(root, (dict, list, tuple)):
        raise FormatError(
            f"{path!r} holds {root!r:.100}, not a state dict; save module.state_dict() instead.",
            path=path,
        )
    entries: dict[str, Entry] = {}
    placed: dict[str, list[Place]] = {}
    planner_data: dict[str, Keys] = {}
    for keys, value in _Walk(nbytes, path).leaves(root):
        fqn = ".".join(map(str, keys))
        if fqn in entries:
            raise FormatError(f"Two entries of {path!r} are called {fqn!r}.", fqn=fqn, path=path)
        planner_data[fqn] = keys
        if isinstance(value, SavedTensor):
            entries[fqn], placed[fqn] = _tensor(fqn, value, file)
        else:
            entries[fqn] = value
    return ForeignSource(
        path, list(entries.values()), placed, save_id=identity(path), planner_data=planner_data
    )


def _tensor(fqn: str, tensor: SavedTensor, file: TorchFile) -> tuple[Entry, list[Place]]:
    place = file.place(tensor)
    found = placed_tensor(
        fqn,
        tensor.torch_dtype,
        tensor.shape,
        [(Region.whole(tensor.shape), lambda: place)],
        is_contiguous=place.is_contiguous,
    )
    return found.entry, list(found.places)


def plain_object(payload: bytes, fqn: str) -> tuple[Any, ...]:
    """Return an object that ``torch.save`` wrote, in a tuple: empty where only torch can tell it.

    Raises
    ------
    CorruptionError, FormatError
        If it is no whole object.
    """
    root = torch_files.read(io.BytesIO(payload), fqn).root  # type: ignore[arg-type]
    walk = _Walk(len(payload), fqn)
    return (root,) if all(type(part) in _PLAIN for part in walk.within(root, 0)) else ()


class _Walk:
    """Visits what a state dict holds, each place once, and not for ever."""

    def __init__(self, nbytes: int, path: str) -> None:
        self._left = nbytes + _VISITS
        self._path = path

    def leaves(self, value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:  # noqa: ANN401
        """Yield tensors and objects with the keys to them; opens dicts, and lists of tensors."""
        if isinstance(value, dict):
            items: Any = dict.items(value)
        elif isinstance(value, (list, tuple)) and (not keys or self._has_tensor(value, 0)):
            items = enumerate(value)
        else:
            yield keys, value if isinstance(value, SavedTensor) else self._object(keys, value)
            return
        if len(keys) > _MAX_DEPTH:
            raise FormatError(f"{self._path!r} is nested too deeply.", path=self._path)
        for key, item in items:
            self._visit()
            yield from self.leaves(
                item, (*keys, key if type(key) in (str, int) else reprlib.repr(key))
            )

    def _visit(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise FormatError(f"{self._path!r} holds itself, again and again.", path=self._path)

    def _has_tensor(self, value: Any, depth: int) -> bool:  # noqa: ANN401
        return any(isinstance(item, SavedTensor) for item in self.within(value, depth))

    def within(self, value: Any, depth: int) -> Iterator[Any]:  # noqa: ANN401
        """Yield a value and all that it holds."""
        self._visit()
        yield value
        if depth > _MAX_DEPTH:
            raise FormatError(f"{self._path!r} is nested too deeply.", path=self._path)
        if isinstance(value, dict):
            value = [*dict.keys(value), *dict.values(value)]
        if isinstance(value, (list, tuple, set, frozenset)):
            for item in value:
                yield from self.within(item, depth + 1)

    def _object(self, keys: Keys, value: Any) -> ObjectEntry:  # noqa: ANN401
        """Return the entry of an object; one that is not of plain values is not handed out."""
        fqn = ".".join(map(str, keys))
        for part in self.within(value, 0):
            if type(part) not in (*_PLAIN, TorchName):
                return ObjectEntry(fqn, refused=described(part))
            if isinstance(part, int) and part.bit_length() > _MAX_INTEGER_BITS:
                return ObjectEntry(fqn, refused="an integer of thousands of digits")
        return ObjectEntry(fqn, (value,))
