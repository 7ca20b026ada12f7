"""`as_default`: DCP's calls that are given a ``checkpoint_id`` alone save and load through us.

DCP chooses their storage from a list of its own, which nothing can extend. This module knows where
that list stands in torch's private modules, and refuses a torch where it stands elsewhere.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from dcp_zarr.api import storage_writer
from dcp_zarr.errors import OptionError
from dcp_zarr.reader import DcpReader
from dcp_zarr.zarr_format import DOCUMENT

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

_DCP = "torch.distributed.checkpoint"
_TORCHS = (".metadata", "__0.metadata")
"""What torch's own directories hold: metadata of all ranks, or of each."""
_NOWHERE = "dcp_zarr-asks-which-storage-this-is"


@dataclass(frozen=True)
class _Kind:
    """Stands in DCP's list where a storage class does."""

    make: Callable[[str | os.PathLike[str]], Any]
    """Returns the storage for an id."""

    def __call__(self, checkpoint_id: str | os.PathLike[str]) -> Any:  # noqa: ANN401
        """Make the storage, as the class would be made."""
        return self.make(checkpoint_id)

    def validate_checkpoint_id(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take every id: one that is no path raises when the storage is made."""
        return True


_active: list[tuple[_Kind, _Kind]] = []
"""Writer and reader of each `as_default` that holds; the last one is asked."""
_changes = ExitStack()
"""Undoes what is changed in torch."""


def as_default(
    *,
    allow_cast: bool = False,
    thread_count: int | None = None,
    **options: Any,  # noqa: ANN401
) -> ExitStack:
    """Let `dcp.save`, `dcp.load` and `dcp.async_save` use dcp_zarr where only an id is given.

    For trainers that pass a ``checkpoint_id`` and no storage. The id is a path, or an address in an
    object store: one that ends in ``.h5`` becomes an HDF5 file, one that ends in ``.zip`` a zip
    file, any other a Zarr directory of exactly that name. What stands at a path is loaded as what
    it is: a directory that torch's own writer made with torch's own reader, all else with ours. A
    call that is given a storage object keeps it. All ranks and threads of a process are meant; call
    it on all ranks.

    As a context manager it holds for a block; a save that `dcp.async_save` began there stays ours.
    As a plain call it holds from now on, or until ``close()`` of what is returned. The last one
    that holds is asked.

    Parameters
    ----------
    allow_cast
        Whether loading may round values into a narrower dtype.
    thread_count
        Worker threads of this rank; by default its share of the cores.
    options
        Further options of `ZarrStorageWriter` or `HDF5StorageWriter`, such as ``compression``.

    Raises
    ------
    OptionError
        If an option has a value that cannot be used, or if this torch chooses its storage in a
        way that is not known here; nothing is changed then.

    Examples
    --------
    >>> import torch, torch.distributed.checkpoint as dcp
    >>> with as_default(compression="small"):
    ...     _ = dcp.save({"w": torch.ones(4)}, checkpoint_id="run/step-100")
    >>> open_checkpoint("run/step-100")["w"][:]
    tensor([1., 1., 1., 1.])
    """
    writer = _Kind(partial(storage_writer, thread_count=thread_count, **options))
    reader = _Kind(partial(_reader, thread_count=thread_count, allow_cast=allow_cast))
    writer(_NOWHERE)  # raises here, not in the first save, where an option is wrong
    kinds = writer, reader
    _active.append(kinds)
    undo = ExitStack()
    undo.callback(_forget, kinds)
    with ExitStack() as on_error:
        on_error.push(undo)
        _apply()
        on_error.pop_all()
    return undo


def _forget(kinds: tuple[_Kind, _Kind]) -> None:
    _active[:] = [other for other in _active if other is not kinds]
    _apply()


def _apply() -> None:
    """Put the last writer and reader, or torch's own, where DCP looks for them."""
    _changes.close()
    if not _active:
        return
    writer, reader = _active[-1]
    with ExitStack() as changes:
        try:
            _change(changes, writer, reader)
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            raise _unknown(error) from error
        _changes.push(changes.pop_all())


def _change(changes: ExitStack, writer: _Kind, reader: _Kind) -> None:
    storage = import_module(f"{_DCP}._storage_utils")
    _set(changes, storage, "FileSystemWriter", writer)
    _set(changes, storage, "FileSystemReader", reader)
    for kind in ("Thread", "Process"):
        module = import_module(f"{_DCP}._async_{kind.lower()}_executor")
        executor = getattr(module, f"_{kind}BasedAsyncCheckpointExecutor")
        _set(changes, executor, "execute_save", _given_a_writer(executor.execute_save, writer))
    for caller, is_reader in (("state_dict_saver", False), ("state_dict_loader", True)):
        choose = import_module(f"{_DCP}.{caller}")._storage_setup
        found = choose(None, _NOWHERE, reader=is_reader)
        if type(found) is not type((reader if is_reader else writer)(_NOWHERE)):
            raise TypeError(f"{_DCP}.{caller} chose {type(found).__name__}")


def _set(changes: ExitStack, where: Any, name: str, value: Any) -> None:  # noqa: ANN401
    changes.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)


def _given_a_writer(execute_save: Callable[..., Any], writer: _Kind) -> Callable[..., Any]:
    """Choose the writer when a save begins: its thread, or process, may ask when that is undone."""
    if not {"checkpoint_id", "storage_writer"} <= inspect.signature(execute_save).parameters.keys():
        raise TypeError(f"{execute_save.__qualname__} takes other arguments")

    @wraps(execute_save)
    def execute(
        *arguments: Any,  # noqa: ANN401
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: Any = None,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if not storage_writer and checkpoint_id:
            storage_writer = writer(checkpoint_id)
        return execute_save(
            *arguments, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **named
        )

    return execute


def _reader(path: str | os.PathLike[str], **options: Any) -> StorageReader:  # noqa: ANN401
    here = Path(path)
    if not (here / DOCUMENT).exists() and any((here / name).is_file() for name in _TORCHS):
        return FileSystemReader(path)
    return DcpReader(path, **options)


def _unknown(error: Exception) -> OptionError:
    return OptionError(
        f"as_default does not know how torch {torch.__version__} chooses its storage ({error}). "
        "Pass the storage itself: dcp.save(..., storage_writer=dcp_zarr.storage_writer(path))."
    )
