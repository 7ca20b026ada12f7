"""Opening a directory that `torch.distributed.checkpoint` saved: ``.metadata`` and ``*.distcp``.

``.metadata`` is a pickled `Metadata`; its ``storage_data`` says where each write item lies. An
item is a file of ``torch.save`` within a file; or it is in one of safetensors, which then holds all
tensors of a file (``filesystem.py``).
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_zarr.containers.foreign import safetensors, torch_files
from dcp_zarr.containers.foreign.foreign_source import (
    ForeignSource,
    Place,
    identity,
    placed_tensor,
)
from dcp_zarr.containers.foreign.pickles import Inert, TorchName, Unpickler
from dcp_zarr.containers.foreign.strided import Strided
from dcp_zarr.errors import CorruptionError, DcpZarrError, FormatError, LayoutError
from dcp_zarr.layout import object_layout
from dcp_zarr.region import Region
from dcp_zarr.schema import Entry, Keys, ObjectEntry

if TYPE_CHECKING:
    from dcp_zarr.canonical_json import Json
    from dcp_zarr.region import Shape

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata."
_MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")


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
    metadata = _read_metadata(path)
    try:
        items = _items(path, metadata)
        entries: dict[str, Entry] = {}
        placed: dict[str, list[Place]] = {}
        for fqn, told in metadata["state_dict_metadata"].items():
            entries[fqn], placed[fqn] = _entry(_text(fqn), told, items)
        planner_data = _planner_data(metadata.get("planner_data"))
    except DcpZarrError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _not_valid(path, error) from error
    version = metadata.get("version")
    return ForeignSource(
        path,
        list(entries.values()),
        placed,
        save_id=identity(os.path.join(path, METADATA)),
        planner_data=planner_data,
        metadata_version=version if isinstance(version, str) else None,
    )


def _not_valid(path: str, error: Exception) -> FormatError:
    return FormatError(
        f"The .metadata of {path!r} is not torch's, or of a version that is not known: "
        f"{error!r:.200}",
        path=path,
    )


def _read_metadata(path: str) -> Mapping[str, Any]:
    content = Path(path, METADATA).read_bytes()
    try:
        root = Unpickler(io.BytesIO(content), {}).read()
    except FormatError as error:
        raise _not_valid(path, error) from error
    if not isinstance(root, Inert) or root.global_name != _MODULE + "Metadata":
        raise _not_valid(path, TypeError(f"it holds {root!r:.80}"))
    if not isinstance(root.state, dict):
        raise _not_valid(path, TypeError("it is empty"))
    return root.state


def _text(value: Any) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _shape(value: Any) -> Shape:  # noqa: ANN401
    if not isinstance(value, tuple) or any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise TypeError(f"{value!r:.40} is no shape")
    return value


def _planner_data(told: Any) -> dict[str, Keys] | None:  # noqa: ANN401
    """Return where entries stand in the nested state dict, where the planner says so plainly."""
    if not isinstance(told, dict):
        return None
    plain = all(
        isinstance(keys, tuple) and keys and all(type(key) in (str, int) for key in keys)
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
                f"{fqn!r} in {path!r} went through {told.state['transform_descriptors']!r:.60}, "
                "which only torch undoes: load it there, and save it with dcp_zarr.",
                fqn=fqn,
                path=path,
            )
        name = _text(told.state["relative_path"])
        if Path(name).name != name:
            raise FormatError(
                f"{fqn!r} is said to lie outside of {path!r}, in {name!r:.80}.", path=path
            )
        at, nbytes = _shape((told.state["offset"], told.state["length"]))
        key = (fqn, None if offsets is None else _shape(offsets))
        items[key] = _Item(os.path.join(path, name), at, nbytes)
    return items


def _entry(
    fqn: str,
    told: Any,  # noqa: ANN401
    items: Mapping[tuple[str, Shape | None], _Item],
) -> tuple[Entry, list[Place]]:
    kind = told.global_name.removeprefix(_MODULE)
    if kind == "BytesStorageMetadata":
        item = items[fqn, None]
        place = Strided.contiguous(item.path, item.offset, 1, (item.nbytes,))
        array = object_layout(fqn, fqn, item.nbytes)
        return ObjectEntry(fqn, (), array, 0, item.nbytes), [lambda: place]
    if kind != "TensorStorageMetadata":
        raise TypeError(f"{fqn!r} is a {kind:.80}")
    torch_dtype, properties = _properties(told.state["properties"])
    parts: list[tuple[Region, Place]] = []
    for part in told.state["chunks"]:
        region = Region(_shape(part.state["offsets"]), _shape(part.state["sizes"]))
        item = items.get((fqn, region.offsets)) or items[fqn, None]
        parts.append((region, _Located(item, fqn, torch_dtype, region.sizes)))
    try:
        found = placed_tensor(
            fqn, torch_dtype, _shape(told.state["size"]), parts, properties=properties
        )
    except LayoutError as error:
        raise CorruptionError(f"The .metadata of it is damaged: {error}", fqn=fqn) from error
    return found.entry, list(found.places)


def _properties(told: Any) -> tuple[str, dict[str, Json]]:  # noqa: ANN401
    """Return dtype and those properties that differ from torch's defaults."""
    dtype, layout, requires_grad, memory_format, pin_memory = told.state
    if not isinstance(dtype, TorchName):
        raise TypeError(f"{dtype!r:.40} is no dtype that can be read")
    described: dict[str, Json] = {}
    if layout != "strided":
        described["layout"] = str(layout)
    if requires_grad is True:
        described["requires_grad"] = True
    if (number := memory_format.args[0]) != 0:
        described["memory_format"] = _MEMORY_FORMATS[number]
    if pin_memory is True:
        described["pin_memory"] = True
    return str(dtype), described


class _Located:
    """Gives the place of an item's elements, which it looks up in the item once."""

    def __init__(self, item: _Item, fqn: str, torch_dtype: str, sizes: Shape) -> None:
        self._item, self._fqn, self._expected = item, fqn, (torch_dtype, sizes)
        self._lock = threading.Lock()
        self._found: Strided | None = None

    def __call__(self) -> Strided:
        with self._lock:
            if self._found is None:
                self._found = self._look_up()
            return self._found

    def _look_up(self) -> Strided:
        path, offset, nbytes = self._item
        with open(path, "rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            if offset + nbytes > end:
                raise CorruptionError(f"{path!r} ends before byte {offset + nbytes}.", path=path)
            begins = os.pread(file.fileno(), 9, offset)
            if safetensors.is_safetensors(begins):
                found = safetensors.read_header(file, offset, end, path)
                torch_dtype, place = found.get(self._fqn, ("nothing", None))
            else:
                section = torch_files.Section(file.fileno(), offset, nbytes)
                saved = torch_files.read(section, path, start=offset)
                is_tensor = isinstance(saved.root, torch_files.SavedTensor)
                torch_dtype = saved.root.torch_dtype if is_tensor else repr(saved.root)
                place = saved.place(saved.root) if is_tensor else None
        if place is None or (torch_dtype, place.shape) != self._expected:
            raise CorruptionError(
                f"{path!r} holds {torch_dtype:.80} {list(place.shape) if place else ''} for tensor "
                f"{self._fqn!r}, expected {self._expected[0]} {list(self._expected[1])}.",
                fqn=self._fqn,
                path=path,
            )
        return place
