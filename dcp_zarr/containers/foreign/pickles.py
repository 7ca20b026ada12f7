"""Unpickling without running anything: what is known by name becomes plain values, all else inert.

The opcodes are those of Python's ``pickletools``. The unpickler is that of the standard library
written in Python: its memo is a dictionary and its reads are bounded by the file, so that a
hostile pickle takes no more memory than it is long. Globals are never imported.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np

from dcp_zarr.dtypes import TABLE
from dcp_zarr.errors import FormatError

if TYPE_CHECKING:
    from typing import Self

_PurePython: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]
_MAX_ELEMENT_BYTES = 16
_MAX_COPIED = 64 << 20
"""Items and bytes that calls may copy: a list that many calls copy would fill the memory."""
_REFUSED = (
    pickle.PERSID,
    pickle.INST,
    pickle.OBJ,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
"""Opcodes that nothing of torch's writes, and that would allocate or import."""


class Inert:
    """An object of a class that is not known: it holds what it was made of, and does nothing."""

    global_name = ""
    """Module and name of the class or function."""

    def __new__(cls, *args: Any, **_: Any) -> Self:  # noqa: ANN401
        """Take whatever a class or function would be called with."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    args: tuple[Any, ...]
    state: Any

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """Drop what a subclass of dict would hold."""

    def extend(self, items: Any) -> None:  # noqa: ANN401
        """Drop what a subclass of list would hold."""

    append = add = extend

    def __repr__(self) -> str:
        """Name the class."""
        return f"an object of {self.global_name}"


def described(value: Any) -> str:  # noqa: ANN401
    """Say what a value is that is not handed out."""
    if isinstance(value, type) and issubclass(value, Inert):
        return f"the class or function {value.global_name:.100}"
    return f"{value!r:.120}" if isinstance(value, Inert) else "a class or function of torch"


class TorchName(str):
    """A dtype, layout or device of torch, by its name."""

    __slots__ = ()


def _numpy_scalar(dtype: Any, content: Any = b"") -> Any:  # noqa: ANN401
    """Return a numpy scalar as a Python number; only numbers are known."""
    if not isinstance(dtype, Inert) or not isinstance(content, bytes):
        raise FormatError("A numpy scalar in it is not valid.")
    code, order = str(dtype.args[0]), dtype.state[1] if dtype.state else "="
    found = np.dtype(code if order in "|=" else order + code)
    if found.kind not in "biufc" or not 0 < len(content) == found.itemsize <= _MAX_ELEMENT_BYTES:
        raise FormatError(f"A numpy scalar in it is of dtype {code!r:.40}, which is no number.")
    return np.frombuffer(content, found)[0].item()


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:  # noqa: ANN401
    if not isinstance(text, str) or encoding != "latin1":
        raise FormatError("Bytes in it are not valid.")
    return text.encode("latin1")


def _plain_dict(*_: Any) -> dict[Any, Any]:  # noqa: ANN401
    return {}


def _size(sizes: Any = ()) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(sizes)


def _device(kind: str, index: int | None = None) -> TorchName:
    return TorchName(kind if index is None else f"{kind}:{index:d}")


_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _plain_dict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "__builtin__.set": set,
    "__builtin__.frozenset": frozenset,
    "__builtin__.complex": complex,
    "_codecs.encode": _encoded,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
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
        full = f"{module}.{name}"
        if full not in self._globals:
            self._globals[full] = type("Inert", (Inert,), {"global_name": full})
        return self._globals[full]

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

    def _reduce(self) -> None:
        """Call what is known; no more than some bytes are copied by calls."""
        self._copied += sum(len(a) for a in self.stack[-1] if hasattr(a, "__len__"))
        if self._copied > _MAX_COPIED:
            raise FormatError("It copies more than a checkpoint's objects would.")
        self.load_reduce()

    def _build(self) -> None:
        """Keep the state of what is inert; an `OrderedDict`'s (torch's versions) is dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], OrderedDict):
            raise FormatError("It changes what is no object of its own.")

    def _refuse(self) -> None:
        raise FormatError("It uses a part of pickle that torch does not write.")

    dispatch: ClassVar = {
        **_PurePython.dispatch,
        pickle.REDUCE[0]: _reduce,
        pickle.BUILD[0]: _build,
        **dict.fromkeys((opcode[0] for opcode in _REFUSED), _refuse),
    }
