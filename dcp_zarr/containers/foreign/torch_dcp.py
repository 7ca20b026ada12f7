"""Opening a directory that `torch.distributed.checkpoint` saved: ``.metadata`` and ``*.distcp``.

``.metadata`` is a pickled `Metadata`; its ``storage_data`` says where each write item lies. An
item is a file of ``torch.save`` within a file; or it is in one of safetensors, which then holds all
tensors of a file (``filesystem.py``).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_zarr.containers.foreign import safetensors, torch_files
from dcp_zarr.containers.foreign.foreign_source import ForeignSource, Place, Placed, placed_tensor
from dcp_zarr.containers.foreign.pickles import Inert, TorchName, Unpickler, kind_of
from dcp_zarr.containers.foreign.strided import Strided, is_file_name, numbers_of_axes
from dcp_zarr.errors import CorruptionError, DcpZarrError, FormatError
from dcp_zarr.layout import object_layout
from dcp_zarr.region import Region
from dcp_zarr.schema import Keys, ObjectEntry

if TYPE_CHECKING:
    from dcp_zarr.canonical_json import Json
    from dcp_zarr.region import Shape

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata."
_MORE_ITEMS = 1 << 16
"""Items that a list may have, besides one for each entry: those that hold nothing are not told."""
_MEMORY_FORMATS = {1: "channels_last", 2: "preserve_format"}


_Headers = dict[tuple[str, int], "dict[str, safetensors.Part]"]
"""What headers of safetensors tell, by file and first byte."""


class _Item(NamedTuple):
    """Where a write item lies."""

    path: str
    offset: int
    nbytes: int


def open_directory(path: str) -> ForeignSource:
    """Open a directory; what is in its files is looked at when it is read.

    Raises
    ------
    CorruptionError, FormatError, UnsupportedTensorError
        If its metadata is not whole, or says what cannot be read.
    """
    metadata, status = _read_metadata(path)
    try:
        items = _items(path, metadata)
        headers: _Headers = {}
        entries = {
            fqn: _entry(_text(fqn), told, items, headers)
            for fqn, told in _described(metadata, status.st_size).items()
        }
        planner_data = _planner_data(metadata.get("planner_data"))
    except DcpZarrError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _not_valid(path, error) from error
    version = metadata.get("version")
    return ForeignSource(
        path,
        entries,
        documents={os.path.join(path, METADATA): status},
        planner_data=planner_data,
        metadata_version=version if isinstance(version, str) else None,
    )


def _not_valid(path: str, error: Exception) -> FormatError:
    return FormatError(
        f"The .metadata of {path!r} is not torch's, or of a version that is not known: "
        f"{error!r:.200}",
        path=path,
    )


def _read_metadata(path: str) -> tuple[Mapping[str, Any], os.stat_result]:
    try:
        with Path(path, METADATA).open("rb") as file:
            status = os.fstat(file.fileno())
            root = Unpickler(io.BytesIO(file.read()), {}).read()
    except FormatError as error:
        raise _not_valid(path, error) from error
    if not isinstance(root, Inert) or root.global_name != _MODULE + "Metadata":
        raise _not_valid(path, TypeError(f"it holds {kind_of(root)}"))
    if not isinstance(root.state, dict):
        raise _not_valid(path, TypeError("it is empty"))
    return root.state, status


def _text(value: Any) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise TypeError(f"{kind_of(value)} is no text")
    return value


def _described(metadata: Mapping[str, Any], nbytes: int) -> Mapping[str, Any]:
    """Return what is told of tensors and objects; regions that they share are not without end."""
    described: Mapping[str, Any] = metadata["state_dict_metadata"]
    if sum(len(told.state["chunks"]) for told in described.values() if told.state) > nbytes:
        raise ValueError("it has more regions than it tells of")
    return described


def _planner_data(told: Any) -> dict[str, Keys] | None:  # noqa: ANN401
    """Return where entries stand in the nested state dict, where the planner says so plainly."""
    if not isinstance(told, dict):
        return None
    most = len(told) + _MORE_ITEMS
    plain = all(
        isinstance(keys, tuple)
        and keys
        and all(type(key) is str or (type(key) is int and 0 <= key < most) for key in keys)
        for keys in told.values()
    )
    return told if plain else None


def _items(path: str, metadata: Mapping[str, Any]) -> dict[tuple[str, Shape | None], _Item]:
    """Return where each write item lies, by name and offsets."""
    items = {}
    for index, told in metadata["storage_data"].items():
        fqn, offsets = _text(index.state["fqn"]), index.state.get("offset")
        if told.state.get("transform_descriptors"):
            raise FormatError(
                f"{fqn!r} in {path!r} went through a transform, which only torch undoes: load it "
                "there, and save it with dcp_zarr.",
                fqn=fqn,
                path=path,
            )
        name = _text(told.state["relative_path"])
        if not is_file_name(name):
            raise FormatError(
                f"{fqn!r} is said to lie outside of {path!r}, in {name!r:.80}.", path=path
            )
        at, nbytes = numbers_of_axes((told.state["offset"], told.state["length"]))
        key = (fqn, None if offsets is None else numbers_of_axes(offsets))
        items[key] = _Item(os.path.join(path, name), at, nbytes)
    return items


def _entry(
    fqn: str,
    told: Any,  # noqa: ANN401
    items: Mapping[tuple[str, Shape | None], _Item],
    headers: _Headers,
) -> Placed:
    kind = told.global_name.removeprefix(_MODULE)
    if kind == "BytesStorageMetadata":
        item = items[fqn, None]
        with suppress(OSError):  # what is missing is told when it is read
            if os.stat(item.path).st_size < item.offset + item.nbytes:
                raise CorruptionError(f"{item.path!r} ends before object {fqn!r} does.", fqn=fqn)
        place = Strided.contiguous(item.path, item.offset, 1, (item.nbytes,))
        array = object_layout(fqn, fqn, item.nbytes)
        return ObjectEntry(fqn, (), array, 0, item.nbytes), [place.itself]
    if kind != "TensorStorageMetadata":
        raise TypeError(f"{fqn!r} is {told!r}")
    torch_dtype, properties = _properties(told.state["properties"])
    parts: list[tuple[Region, Place]] = []
    for part in told.state["chunks"]:
        offsets, sizes = map(numbers_of_axes, (part.state["offsets"], part.state["sizes"]))
        item = items.get((fqn, offsets)) or items[fqn, None]
        look_up = cache(partial(_look_up, item, fqn, torch_dtype, sizes, headers))
        parts.append((Region(offsets, sizes), look_up))
    shape = numbers_of_axes(told.state["size"])
    return placed_tensor(fqn, torch_dtype, shape, parts, properties=properties)


def _properties(told: Any) -> tuple[str, dict[str, Json]]:  # noqa: ANN401
    """Return dtype and those properties that differ from torch's defaults."""
    dtype, layout, requires_grad, memory_format, pin_memory = told.state
    if not isinstance(dtype, TorchName):
        raise TypeError(f"{kind_of(dtype)} is no dtype that can be read")
    described: dict[str, Json] = {}
    if isinstance(layout, TorchName) and layout != "strided":
        described["layout"] = str(layout)
    if requires_grad is True:
        described["requires_grad"] = True
    match memory_format:
        case Inert(args=(1 | 2 as number,)):  # 0 is the default
            described["memory_format"] = _MEMORY_FORMATS[number]
    if pin_memory is True:
        described["pin_memory"] = True
    return str(dtype), described


def _look_up(item: _Item, fqn: str, torch_dtype: str, sizes: Shape, headers: _Headers) -> Strided:
    """Return where an item's elements lie, which stands in the item."""
    path, offset, nbytes = item
    with open(path, "rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        if offset + nbytes > end:
            raise CorruptionError(f"{path!r} ends before byte {offset + nbytes}.", path=path)
        found: tuple[str, Strided] | None = None
        if safetensors.is_safetensors(os.pread(file.fileno(), 9, offset)):
            if (path, offset) not in headers:  # one header tells of thousands of items
                headers[path, offset] = safetensors.read_header(file, offset, end, path)
            if part := headers[path, offset].get(fqn):
                found = part.torch_dtype, part.place
        else:
            section = torch_files.Section(file.fileno(), offset, nbytes)
            saved = torch_files.read(section, path, start=offset)
            if isinstance(saved.root, torch_files.SavedTensor):
                found = saved.root.torch_dtype, saved.place(saved.root)
    if not found or (found[0], found[1].shape) != (torch_dtype, sizes):
        described = f"{found[0]} {list(found[1].shape)}" if found else "something else"
        raise CorruptionError(
            f"{path!r} holds {described} for tensor {fqn!r}, expected {torch_dtype} {list(sizes)}.",
            fqn=fqn,
            path=path,
        )
    return found[1]
