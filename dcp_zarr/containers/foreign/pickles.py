"""Unpickling without running anything: what is known by name becomes plain values, all else inert.

The opcodes are those of Python's ``pickletools``. The unpickler is that of the standard library
written in Python: its memo is a dictionary and its reads are bounded by the file, so that memory
grows with the length of a hostile pickle, and not with what it claims. Parts may be shared, so that
little makes much: nothing here prints, hashes or copies a value without a bound. Globals are never
imported.
"""

from __future__ import annotations

import pickle
import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, ClassVar

import numpy as np

from dcp_zarr.dtypes import TABLE
from dcp_zarr.errors import FormatError

_PurePython: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]
_MAX_COPIED = 64 << 20
"""Bytes that calls may copy: a list that many calls copy would fill the memory."""
_ITEM_BYTES, _FEW_ITEMS = 16, 8
"""What an item of a list counts; a call with few is no more than the opcodes that it takes."""
_MAX_KEY_PARTS = 64
"""Parts of a key, in tuples and sets: to hash or compare what shares its parts takes for ever."""
_MAX_NAME_LENGTH, _MAX_SHOWN_LENGTH = 1000, 100
_NUMBERS = re.compile("b1|[iu][1248]|f[248]|c8|c16")
"""Codes of numpy's dtypes that are Python's numbers."""
_REFUSED = (
    pickle.PERSID,
    pickle.INST,
    pickle.OBJ,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INT,
    pickle.LONG,
    pickle.LONG4,
    pickle.DICT,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
"""Opcodes that nothing of torch's writes, and that would allocate, import or be slow to print."""


class Inert:
    """A class or function that is not known, or what it would make: it does nothing.

    Parameters
    ----------
    global_name
        Module and name of the class or function.
    args
        What it was called with; None for the class or function itself.
    """

    __slots__ = ("args", "global_name", "state")

    def __init__(self, global_name: str, args: tuple[Any, ...] | None = None) -> None:
        self.global_name = global_name
        self.args = args
        self.state: Any = None

    def __call__(self, *args: Any) -> Inert:  # noqa: ANN401
        """Take whatever a class or function would be called with."""
        return Inert(self.global_name, args)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """Drop what a subclass of dict would hold."""

    def extend(self, items: Any) -> None:  # noqa: ANN401
        """Drop what a subclass of list would hold."""

    append = add = extend

    def __repr__(self) -> str:
        """Name the class, so that it can be printed."""
        name = repr(self.global_name[:_MAX_SHOWN_LENGTH])[1:-1]
        return name if self.args is None else f"an object of {name}"


def kind_of(value: Any) -> str:  # noqa: ANN401
    """Name what a value is, for messages; the value itself may take for ever to print."""
    return repr(value) if isinstance(value, Inert) else f"a value of type {type(value).__name__}"


class TorchName(str):
    """A dtype, layout or device of torch, by its name."""

    __slots__ = ()


def _numpy_scalar(dtype: Any = None, content: Any = b"") -> Any:  # noqa: ANN401
    """Return a numpy scalar as a Python number; what is no number is inert."""
    match dtype:
        case Inert(args=(str(code), *_), state=(_, "<" | ">" | "|" as order, *_)):
            if _NUMBERS.fullmatch(code) and isinstance(content, bytes):
                found = np.dtype(order + code)
                if len(content) == found.itemsize:
                    return np.frombuffer(content, found)[0].item()
    return Inert("numpy.generic", (dtype, content))


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:  # noqa: ANN401
    if not isinstance(text, str) or encoding != "latin1":
        raise FormatError("Bytes in it are not valid.")
    return text.encode("latin1")


def _path(*parts: Any) -> str:  # noqa: ANN401
    return posixpath.join(*parts) if parts else "."


def _size(sizes: Any = ()) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(sizes)


def _device(kind: Any, index: int | None = None) -> TorchName:  # noqa: ANN401
    if not isinstance(kind, str):
        raise FormatError("A device in it is not valid.")
    return TorchName(kind if index is None else f"{kind}:{index:d}")


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:  # noqa: ANN401
    _check_keys(key for key, _ in pairs)
    return OrderedDict(pairs)


def _set(members: Any = ()) -> set[Any]:  # noqa: ANN401
    _check_keys(members)
    return set(members)


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise unless each is hashed and compared in no time."""
    for key in keys:
        if type(key) is not str and _parts_left(key, _MAX_KEY_PARTS) < 0:
            raise FormatError("A key in it is nested.")


def _parts_left(value: Any, most: int) -> int:  # noqa: ANN401
    """Return what is left of a number of parts, negative where a value has more."""
    most -= 1
    if isinstance(value, (tuple, frozenset)):
        for part in value:
            if most < 0:
                break
            most = _parts_left(part, most)
    return most


_BUILTINS: dict[str, Any] = {
    "set": _set,
    "frozenset": lambda members=(): frozenset(_set(members)),
    "complex": complex,
    "bytes": lambda: b"",  # as protocol 2 writes it; others come through `_codecs.encode`
}
_KNOWN: dict[str, Any] = {
    **{f"builtins.{name}": made for name, made in _BUILTINS.items()},
    **{f"__builtin__.{name}": made for name, made in _BUILTINS.items()},
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": _encoded,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: TorchName(name.removeprefix("torch.")),
    **{f"torch.{name}": TorchName(name) for name in TABLE},
}


class Unpickler(_PurePython):  # type: ignore[misc]
    """Reads one pickle from a file.

    Parameters
    ----------
    file
        Where it begins.
    known
        What some globals stand for, by module and name, besides those that every pickle may have.
    storage
        What a persistent id stands for; None where there are none.
    """

    def __init__(
        self,
        file: BinaryIO,
        known: dict[str, Any],
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._globals = {**_KNOWN, **known}
        self._storage = storage
        self._copied = 0

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Return what a global stands for; one that is not known is inert."""
        if len(module) + len(name) > _MAX_NAME_LENGTH:
            raise FormatError("It has a class of a name that is too long.")
        full = f"{module}.{name}"
        return self._globals.setdefault(full, Inert(full))

    def persistent_load(self, key: Any) -> Any:  # noqa: ANN401
        """Return what a persistent id stands for."""
        if self._storage is None:
            raise FormatError("It refers to something outside of it.")
        return self._storage(key)

    def read(self) -> Any:  # noqa: ANN401
        """Return the pickle's value.

        Raises
        ------
        FormatError
            If it is no whole pickle of plain values.
        """
        try:
            return self.load()
        except FormatError:
            raise
        except Exception as error:  # whatever hostile bytes lead to
            raise FormatError(f"It is no whole pickle of plain values: {error!r:.200}") from error

    def _call(self) -> None:
        """Call what is known; no more than some bytes are copied by calls."""
        args = self.stack[-1]
        for part in (args, *args):
            if hasattr(part, "__len__") and len(part) > _FEW_ITEMS:
                self._copied += len(part) * (1 if isinstance(part, (str, bytes)) else _ITEM_BYTES)
        if self._copied > _MAX_COPIED:
            raise FormatError("It copies more than a checkpoint's objects would.")
        self.load_reduce()

    def _call_with_names(self) -> None:
        """Call what is known, without the arguments that have names."""
        self.stack.pop()
        self._call()

    def _build(self) -> None:
        """Keep the state of what is inert; an `OrderedDict`'s (torch's versions) is dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], OrderedDict):
            raise FormatError("It changes what is no object of its own.")

    def _set_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        self.load_setitem()

    def _set_items(self) -> None:
        _check_keys(self.stack[::2])
        self.load_setitems()

    def _add_items(self) -> None:
        _check_keys(self.stack)
        self.load_additems()

    def _frozenset(self) -> None:
        _check_keys(self.stack)
        self.load_frozenset()

    def _refuse(self) -> None:
        raise FormatError("It uses a part of pickle that torch does not write.")

    dispatch: ClassVar = {
        **_PurePython.dispatch,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_names,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _PurePython.load_binbytes8,  # as bytes
        **dict.fromkeys((opcode[0] for opcode in _REFUSED), _refuse),
    }
