"""Files of ``torch.save``: the tensors in them, and where their bytes lie. Nothing in them is run.

Two formats: a zip file of ``data.pkl`` and one entry for each storage, since torch 1.6; and before,
a row of pickles with the storages behind (``torch/serialization.py``).
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from dcp_zarr.containers.foreign.pickles import Inert, TorchName, Unpickler, kind_of
from dcp_zarr.containers.foreign.strided import Strided, numbers_of_axes
from dcp_zarr.containers.zip_format import LOCAL_HEADER_BYTES, content_start
from dcp_zarr.dtypes import TABLE, dtype_of
from dcp_zarr.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from dcp_zarr.region import Shape

_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What the older format begins with: torch's magic number, pickled, behind the protocol."""
_MAGIC_BYTES = 32
_MAX_KEY_PARTS = 6
_NUMEL = struct.Struct("<q")

_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QInt8": "int8",  # the quantised are known by size alone: no tensor is made of them
    "QUInt8": "uint8",
    "QUInt4x2": "uint8",
    "QUInt2x4": "uint8",
    "QInt32": "int32",
}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage, by the key of its bytes."""

    key: str
    """The key."""
    torch_dtype: str | None
    """Dtype of its elements; None where it is of bytes."""
    skipped: int = 0
    """Elements of the storage with that key that come before."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """A tensor in a file of ``torch.save``."""

    storage: Storage
    """What its elements lie in."""
    torch_dtype: str
    """Name of its dtype."""
    offset: int
    """Elements of the storage before its first."""
    shape: Shape
    """Its shape."""
    strides: Shape
    """Elements from one to the next on each axis."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What was saved, and where storages lie."""

    root: Any
    """Plain values, `SavedTensor`, and `Inert` for what is not known."""
    places: Mapping[str, tuple[int, int]]
    """For each storage, its first byte in the file and its size."""
    path: str
    """The file."""

    def place(self, tensor: SavedTensor) -> Strided:
        """Return where a tensor lies.

        Raises
        ------
        CorruptionError
            If its storage is missing or too short.
        """
        if tensor.storage.key not in self.places:
            raise CorruptionError(
                f"Storage {tensor.storage.key!r:.40} is missing in {self.path!r}.", path=self.path
            )
        itemsize = dtype_of(tensor.torch_dtype).itemsize
        first, nbytes = self.places[tensor.storage.key]
        skipped = (tensor.storage.skipped + tensor.offset) * itemsize
        place = Strided(self.path, first + skipped, itemsize, tensor.shape, tensor.strides)
        if skipped + place.span > nbytes:
            raise CorruptionError(
                f"A tensor {list(tensor.shape)} in {self.path!r} reaches beyond its storage.",
                path=self.path,
            )
        return place


class Section(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        super().__init__()
        self._fd, self._start, self._nbytes, self._at = fd, start, nbytes, 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte of it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """Fill a buffer, or less of it where it ends."""
        wanted = max(min(len(buffer), self._nbytes - self._at), 0)
        got = os.preadv(self._fd, [memoryview(buffer)[:wanted]], self._start + self._at)
        self._at += got
        return got


def read(raw: io.RawIOBase, path: str, *, start: int = 0) -> TorchFile:
    """Read what was saved, without the bytes of tensors.

    Parameters
    ----------
    raw
        The file, or the part of one that is in this format.
    path
        Path of the file.
    start
        Where in it that part begins.

    Raises
    ------
    CorruptionError, FormatError
        If it is not whole, or no such file.
    """
    nbytes = raw.seek(0, os.SEEK_END)
    raw.seek(0)
    with io.BufferedReader(raw) as file:
        try:
            older = is_older(file.peek(_MAGIC_BYTES))
            root, places = (_read_older if older else _read_zip)(file, nbytes)
        except FormatError as error:
            raise FormatError(
                f"{path!r} is no file of torch.save that can be read. {error}", path=path
            ) from error
        except (
            zipfile.BadZipFile,
            struct.error,
            OSError,
            EOFError,
            ValueError,
            RuntimeError,
        ) as error:
            raise CorruptionError(
                f"{path!r} is no whole file of torch.save: {error}. Restore it from a copy.",
                path=path,
            ) from error
    return TorchFile(root, {key: (start + at, size) for key, (at, size) in places.items()}, path)


def is_older(begins: bytes) -> bool:
    """Say whether a file begins as one of the older format does."""
    return begins.startswith(pickle.PROTO) and _MAGIC in begins[:_MAGIC_BYTES]


Places = dict[str, tuple[int, int]]


def _read_zip(file: BinaryIO, nbytes: int) -> tuple[Any, Places]:
    with zipfile.ZipFile(file) as whole:
        entries = {entry.filename: entry for entry in whole.infolist()}
        pickled = [name for name in entries if name.split("/", 1)[-1] == "data.pkl"]
        if len(pickled) != 1:
            raise FormatError("It is a zip file without one data.pkl.")
        prefix = pickled[0].removesuffix("data.pkl")
        order = entries.get(prefix + "byteorder")
        if order is not None and _content(file, nbytes, order) != b"little":
            raise FormatError("Its tensors are big-endian.")
        content = io.BytesIO(_content(file, nbytes, entries[pickled[0]]))
        root = Unpickler(content, _GLOBALS, _storage).read()
        return root, {
            name.removeprefix(f"{prefix}data/"): (_start(file, nbytes, entry), entry.file_size)
            for name, entry in entries.items()
            if name.startswith(f"{prefix}data/")
        }


def _content(file: BinaryIO, nbytes: int, entry: zipfile.ZipInfo) -> bytes:
    file.seek(_start(file, nbytes, entry))
    return file.read(entry.file_size)


def _start(file: BinaryIO, nbytes: int, entry: zipfile.ZipInfo) -> int:
    """Return where an entry's content begins; all of it is in the file."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise FormatError(f"{entry.filename!r} in it is deflated, as torch never writes it.")
    start = nbytes
    if entry.header_offset < nbytes:
        file.seek(entry.header_offset)
        start = content_start(file.read(LOCAL_HEADER_BYTES), entry.header_offset)
    if start + entry.file_size > nbytes:
        raise EOFError(f"{entry.filename!r:.80} in it is cut off")
    return start


def _read_older(file: BinaryIO, nbytes: int) -> tuple[Any, Places]:
    itemsizes: dict[str, int] = {}

    def storage(key: Any) -> Any:  # noqa: ANN401
        found = _storage(key)
        if isinstance(found, Storage):
            itemsizes[found.key] = dtype_of(found.torch_dtype or "uint8").itemsize
        return found

    for _ in range(3):  # magic number, version of the protocol, sizes of the system's integers
        Unpickler(file, {}).read()
    root = Unpickler(file, _GLOBALS, storage).read()
    places = {}
    keys = Unpickler(file, {}).read()
    if not isinstance(keys, list):
        raise FormatError("It has no list of storages.")
    for key in map(_text, keys):
        if key not in itemsizes:
            raise FormatError("It has a storage that nothing refers to.")
        elements = _NUMEL.unpack(file.read(_NUMEL.size).ljust(_NUMEL.size, b"\xff"))[0]
        places[key] = first, size = file.tell(), elements * itemsizes[key]
        if elements < 0 or first + size > nbytes:
            raise EOFError(f"storage {key!r:.40} is cut off")
        file.seek(first + size)
    return root, places


def _storage(key: Any) -> Any:  # noqa: ANN401
    """Return the storage, or the class, that a persistent id names."""
    if not isinstance(key, tuple) or len(key) > _MAX_KEY_PARTS:
        raise FormatError("It refers to something that is no storage.")
    kind, of, *more = key
    if kind == "module":  # the older format: a class, with its source
        return of
    if kind != "storage" or not isinstance(of, _StorageKind):
        raise FormatError("It refers to something that is no storage.")
    name, _, _, *view = more
    (skipped,) = numbers_of_axes([view[0][1] if view and view[0] else 0])
    return Storage(_text(name), of.torch_dtype, skipped)


@dataclass(frozen=True, slots=True, eq=False)
class _StorageKind:
    torch_dtype: str | None


def _rebuilt(
    storage: Any,  # noqa: ANN401
    offset: Any,  # noqa: ANN401
    shape: Any,  # noqa: ANN401
    strides: Any,  # noqa: ANN401
    *more: Any,  # noqa: ANN401
) -> SavedTensor | Inert:
    """Stand for ``torch._utils._rebuild_tensor_v2``, and for v3, which says the dtype."""
    if not isinstance(storage, Storage):
        raise FormatError("A tensor in it has no storage.")
    names = [name for name in more if isinstance(name, TorchName) and name in TABLE]
    torch_dtype = names[0] if names else storage.torch_dtype
    if torch_dtype is None:
        raise FormatError("A tensor in it has no dtype.")
    if any(isinstance(flags, dict) and (flags.get("conj") or flags.get("neg")) for flags in more):
        return Inert("torch.Tensor, conjugated or negated when it is read", ())
    shape, strides, (offset,) = map(numbers_of_axes, (shape, strides, (offset,)))
    if len(shape) != len(strides):
        raise FormatError("A tensor in it has no valid shape.")
    return SavedTensor(storage, str(torch_dtype), offset, shape, strides)


def _first(tensor: Any, *_: Any) -> Any:  # noqa: ANN401
    """Stand for what wraps a tensor: a parameter."""
    return tensor


def _from_type(rebuild: Any, _: Any, arguments: Any, *__: Any) -> Any:  # noqa: ANN401
    """Stand for ``torch._tensor._rebuild_from_type_v2``: the tensor without its attributes."""
    if rebuild in (_rebuilt, _first) or isinstance(rebuild, Inert):
        return rebuild(*arguments)
    raise FormatError("It makes a tensor in a way that is not known.")


_GLOBALS: dict[str, Any] = {
    **{f"torch.{name}Storage": _StorageKind(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _StorageKind(None),
    "torch.storage.TypedStorage": _StorageKind(None),
    "torch._utils._rebuild_tensor": _rebuilt,
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}


def _text(value: Any) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise FormatError(f"{kind_of(value)} in it is no key of a storage.")
    return value
