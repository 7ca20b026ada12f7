"""Opening a file of ``torch.save``: a state dict, nested or not, as DCP would name its entries."""

from __future__ import annotations

import io
import os
import reprlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from dcp_zarr.containers.foreign import torch_files
from dcp_zarr.containers.foreign.foreign_source import ForeignSource, Placed, placed_tensor
from dcp_zarr.containers.foreign.pickles import TorchName, kind_of
from dcp_zarr.containers.foreign.torch_files import SavedTensor, TorchFile
from dcp_zarr.dtypes import dtype_of
from dcp_zarr.errors import FormatError
from dcp_zarr.region import Region
from dcp_zarr.schema import Keys, ObjectEntry

_MAX_DEPTH = 64
_MAX_NAME_LENGTH = 1000
_LEAF_BYTES, _MORE_VALUES = 4, 1 << 16
"""What holds much, of few bytes that are shared, or itself, is refused: a file has no more leaves,
and an object no more values, than what it is long allows, and some more."""
_EXPANDED_BYTES, _EXPANDED_TIMES = 1 << 30, 1 << 10
"""A tensor that was expanded has so many bytes at most, or so many times those of the file."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, TorchName)
_HOLDERS = (dict, OrderedDict, list, tuple, set, frozenset)


def open_file(path: str) -> ForeignSource:
    """Open a file of ``torch.save``; a tensor alone is called ``tensor``.

    Raises
    ------
    CorruptionError, FormatError
        If it is not whole, or holds no state dict.
    """
    with open(path, "rb", buffering=0) as raw:
        status = os.fstat(raw.fileno())
        file = torch_files.read(raw, path)
    root = {"tensor": file.root} if isinstance(file.root, SavedTensor) else file.root
    if not isinstance(root, (dict, list, tuple)):
        raise FormatError(
            f"{path!r} holds {kind_of(root)}, not a state dict; save module.state_dict() instead.",
            path=path,
        )
    entries: dict[str, Placed] = {}
    planner_data: dict[str, Keys] = {}
    values = _Values(status.st_size, path)
    for keys, value in values.leaves(root):
        if sum(map(len, map(str, keys))) > _MAX_NAME_LENGTH:
            raise FormatError(f"A name in {path!r} is longer than {_MAX_NAME_LENGTH}.", path=path)
        fqn = ".".join(map(str, keys))
        if fqn in entries:
            raise FormatError(f"Two entries of {path!r} are called {fqn!r}.", fqn=fqn, path=path)
        planner_data[fqn] = keys
        if not isinstance(value, SavedTensor):
            refused = values.held(value).refused
            entries[fqn] = ObjectEntry(fqn, () if refused else (value,), refused=refused), ()
        elif _is_out_of_proportion(value, status.st_size):
            refused = f"a tensor {list(value.shape)} of few bytes"
            entries[fqn] = ObjectEntry(fqn, refused=refused), ()
        else:
            entries[fqn] = _tensor(fqn, value, file)
    return ForeignSource(
        path,
        entries,
        documents={path: status},
        planner_data=planner_data,
        shared=_shared(entries),
        keys_as_text=tuple(values.keys_as_text),
    )


def _shared(entries: Mapping[str, Placed]) -> tuple[tuple[str, ...], ...]:
    """Return the names of tensors that lie in the same bytes, together: tied ones, and views."""
    lying = [(place(), fqn) for fqn, (_, places) in entries.items() for place in places]
    groups: list[list[str]] = []
    end = -1
    for place, fqn in sorted(lying, key=lambda found: (found[0].start, -found[0].span)):
        if place.span and place.start < end:
            groups[-1].append(fqn)
        elif place.span:
            groups.append([fqn])
        end = max(end, place.start + place.span)
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _is_out_of_proportion(tensor: SavedTensor, file_nbytes: int) -> bool:
    """Say whether a tensor was expanded so far that reading it would never end."""
    nbytes = prod(tensor.shape) * dtype_of(tensor.torch_dtype).itemsize
    return nbytes > max(_EXPANDED_BYTES, _EXPANDED_TIMES * file_nbytes)


def _tensor(fqn: str, tensor: SavedTensor, file: TorchFile) -> Placed:
    place = file.place(tensor)
    return placed_tensor(
        fqn,
        tensor.torch_dtype,
        tensor.shape,
        [(Region.whole(tensor.shape), place.itself)],
        is_contiguous=place.is_contiguous,
    )


def plain_object(payload: bytes, fqn: str) -> tuple[Any, ...]:
    """Return an object that ``torch.save`` wrote, in a tuple: empty where only torch can tell it.

    Raises
    ------
    CorruptionError, FormatError
        If it is no whole object.
    """
    root = torch_files.read(io.BytesIO(payload), fqn).root  # type: ignore[arg-type]
    held = _Values(len(payload), fqn).held(root)
    return () if held.refused or held.has_name else (root,)


class _Held(NamedTuple):
    """What a value is, or holds."""

    values: int = 1
    """Values in it; one that is held again counts again."""
    refused: str = ""
    """What of it is not plain; empty where all is."""
    has_tensor: bool = False
    """Whether there is a tensor in it."""
    has_name: bool = False
    """Whether there is a name of torch's in it, such as a dtype."""


_ATOM, _NAME = _Held(), _Held(has_name=True)


class _Values:
    """What a file holds, where values may be held by many others, and hold themselves."""

    def __init__(self, nbytes: int, path: str) -> None:
        self._most = nbytes + _MORE_VALUES
        self._leaves_left = nbytes // _LEAF_BYTES + _MORE_VALUES
        self._path = path
        self._known: dict[int, _Held] = {}
        self.keys_as_text: dict[str, None] = {}
        """Names of dicts that have other keys than text."""

    def leaves(self, value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:  # noqa: ANN401
        """Yield tensors and objects with the keys to them; opens dicts, and lists of tensors."""
        self._leaves_left -= 1
        if self._leaves_left < 0 or len(keys) > _MAX_DEPTH:
            raise FormatError(
                f"{self._path!r} holds itself, or is nested too deeply.", path=self._path
            )
        if isinstance(value, dict) and (value or not keys):  # an empty one is a value itself
            for key, item in value.items():
                name = key if type(key) is str else reprlib.repr(key)
                if type(key) is not str:
                    self.keys_as_text[".".join(map(str, keys))] = None
                yield from self.leaves(item, (*keys, name))
        elif isinstance(value, (list, tuple)) and (not keys or self.held(value).has_tensor):
            for number, item in enumerate(value):
                yield from self.leaves(item, (*keys, number))
        else:
            yield keys, value

    def held(self, value: Any, depth: int = 0) -> _Held:  # noqa: ANN401
        """Look at a value and all in it, once however often it is held."""
        if isinstance(value, SavedTensor):
            return _Held(refused="a set of tensors", has_tensor=True)
        if type(value) in _PLAIN:
            return _NAME if type(value) is TorchName else _ATOM
        if type(value) not in _HOLDERS:
            return _Held(refused=kind_of(value))
        if depth > _MAX_DEPTH:
            return _Held(refused="a value that is nested too deeply")
        if id(value) not in self._known:
            self._known[id(value)] = _Held(refused="a value that holds itself")
            parts = [self.held(part, depth + 1) for part in value]
            if isinstance(value, dict):
                parts += [self.held(part, depth + 1) for part in value.values()]
            values = 1 + sum(part.values for part in parts)
            too_many = "a value that holds the same again and again" if values > self._most else ""
            self._known[id(value)] = _Held(
                values,
                next((part.refused for part in parts if part.refused), too_many),
                any(part.has_tensor for part in parts),
                any(part.has_name for part in parts),
            )
        return self._known[id(value)]
