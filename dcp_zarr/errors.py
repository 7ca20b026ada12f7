"""Every error that dcp_zarr raises on purpose.

The tree, by what a caller would do about it::

    DcpZarrError
    ├── OptionError (ValueError)               fix an argument
    ├── CheckpointNotFoundError (FileNotFoundError)   look elsewhere
    ├── CheckpointExistsError (FileExistsError)       choose another path
    ├── IncompleteCheckpointError (OSError)    the save never committed: use an older one
    ├── FormatError (ValueError)               not ours, or from a newer dcp_zarr
    ├── CorruptionError (ValueError)           bytes are lost or changed: restore a copy
    ├── TensorNotFoundError (KeyError)         fix a name
    ├── TensorMismatchError (ValueError)       fix the model: size, dtype or kind differ
    ├── UnsupportedTensorError (TypeError)     convert or drop the tensor
    ├── UnsafeObjectError (ValueError)         trust the checkpoint, or do without the object
    ├── StoreError (OSError)                   an object store refuses or fails: see why
    ├── LayoutError (ValueError)               the plan's regions do not tile a tensor
    └── SaveError (RuntimeError)               the save was given up; what was there before still is

Errors cross process borders inside DCP, so each takes one message and keyword-only context:
such an exception pickles with all its attributes. The message alone names everything.
"""

from __future__ import annotations

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptionError",
    "DcpZarrError",
    "FormatError",
    "IncompleteCheckpointError",
    "LayoutError",
    "OptionError",
    "SaveError",
    "StoreError",
    "TensorMismatchError",
    "TensorNotFoundError",
    "UnsafeObjectError",
    "UnsupportedTensorError",
]


class DcpZarrError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message
        What failed, the names, found against expected, and what to do.
    fqn
        Fully qualified name of the tensor or object concerned.
    region
        Region of that tensor, as text such as ``"[0:4, 2:8]"``.
    rank
        Rank concerned.
    path
        Path of the checkpoint or file concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        fqn: str | None = None,
        region: str | None = None,
        rank: int | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.region = region
        self.rank = rank
        self.path = path

    def __str__(self) -> str:
        """Return the message itself; KeyError would quote it."""
        return str(self.args[0])


class OptionError(DcpZarrError, ValueError):
    """An option has a value that cannot be used."""


class CheckpointNotFoundError(DcpZarrError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointExistsError(DcpZarrError, FileExistsError):
    """Something stands at the path that must not be replaced."""


class IncompleteCheckpointError(DcpZarrError, OSError):
    """What stands at the path is the rest of a save that never committed."""


class FormatError(DcpZarrError, ValueError):
    """The container is not a dcp_zarr checkpoint, or of a version that this release cannot read."""


class CorruptionError(DcpZarrError, ValueError):
    """Stored bytes are missing, changed, or contradict each other."""


class TensorNotFoundError(DcpZarrError, KeyError):
    """No entry of the checkpoint has that name or matches that pattern."""


class TensorMismatchError(DcpZarrError, ValueError):
    """The stored entry does not fit the place it should be loaded into."""


class UnsupportedTensorError(DcpZarrError, TypeError):
    """A tensor that cannot be stored: its dtype, its layout or its kind."""


class UnsafeObjectError(DcpZarrError, ValueError):
    """Unpickling an object could run code."""


class StoreError(DcpZarrError, OSError):
    """An object store refused a request, or failed, after all tries."""


class LayoutError(DcpZarrError, ValueError):
    """The regions of a plan do not cover a tensor exactly once."""


class SaveError(DcpZarrError, RuntimeError):
    """A save was given up before its commit."""
