"""Where a conversion goes: which format a path means, and what may be replaced there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dcp_zarr.commit import LocalCommit
from dcp_zarr.containers.by_path import open_source
from dcp_zarr.containers.foreign import safetensors, torch_dcp, torch_files
from dcp_zarr.containers.foreign.foreign_by_path import FIRST_BYTES, is_torch_zip
from dcp_zarr.errors import CheckpointExistsError, DcpZarrError, OptionError
from dcp_zarr.safetensors_format import is_file_of_directory

FORMATS = {
    "zarr": (".zarr",),
    "zarr-zip": (".zip",),
    "hdf5": (".h5", ".hdf5"),
    "dcp": (),
    "torch": (".pt", ".pth", ".bin"),
    "safetensors": (".safetensors",),
    "safetensors-directory": (),
}
"""What can be written, and the suffixes that mean it."""

OURS = ("zarr", "zarr-zip", "hdf5")
"""Containers of ours."""
_DIRECTORIES = ("zarr", "dcp", "safetensors-directory")
_INNER = {"zarr-zip": "made.zarr.zip", "hdf5": "made.h5", "safetensors": "made.safetensors"}
"""Names of what is written until it has its place: writers go by suffixes."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a conversion goes."""

    path: str
    """As it was given."""
    format: str
    """One of `FORMATS`."""
    commit: LocalCommit
    """How it appears."""

    @classmethod
    def of(cls, path: str, to: str | None) -> Destination:
        """Return the destination that a path means, or that is told.

        Raises
        ------
        OptionError
            If there is no such format, or the path does not say one.
        """
        suffixes = {suffix: name for name, all_of in FORMATS.items() for suffix in all_of}
        meant = suffixes.get(Path(path.lower()).suffix)
        if to is not None and to not in FORMATS:
            raise OptionError(f"to={to!r} is no format; those are {', '.join(FORMATS)}.")
        if to is None and meant is None:
            raise OptionError(
                f"{path!r} does not say a format by its suffix; pass to= (--to), one of "
                f"{', '.join(FORMATS)}."
            )
        return cls(path, to or meant or "", LocalCommit(path))

    @property
    def made(self) -> Path:
        """Where it is written, before it has its place."""
        return self.commit.partial / _INNER.get(self.format, "made")

    def check(self, *, overwrite: bool) -> None:
        """Raise where something stands that must not be replaced.

        Raises
        ------
        CheckpointExistsError
            If so.
        """
        path = self.commit.path
        self.commit.recover()
        if (path.parent / "zarr.json").exists():
            raise CheckpointExistsError(
                f"{self.path!r} is within a Zarr store: choose another path.", path=self.path
            )
        if not path.exists():
            return
        if not overwrite:
            raise CheckpointExistsError(
                f"{self.path!r} exists: choose another path, or pass overwrite=True (--overwrite).",
                path=self.path,
            )
        is_empty = path.is_dir() and not os.listdir(path)
        if path.is_mount() or not (is_empty or format_of(path) == self.format):
            raise CheckpointExistsError(
                f"{self.path!r} is no checkpoint of format {self.format!r} alone, and is not "
                "replaced: choose another path.",
                path=self.path,
            )

    def show(self) -> None:
        """Give what was written its place."""
        if self.format in _DIRECTORIES:
            self.commit.commit_directory(self.made.name, sync=True)
        else:
            self.commit.commit_file(self.made.name, sync=True)


def format_of(path: Path) -> str | None:
    """Return the format of a checkpoint; None where there is none, or other files besides it."""
    if path.is_dir():
        names = os.listdir(path)
        if torch_dcp.METADATA in names:
            own = all(re.fullmatch(r"\.metadata|.*\.distcp", name) for name in names)
            return "dcp" if own else None
        if "zarr.json" not in names:
            return "safetensors-directory" if all(map(is_file_of_directory, names)) else None
        return "zarr" if _is_ours(path) else None
    with path.open("rb") as file:
        begins = file.read(FIRST_BYTES)
    if torch_files.is_older(begins) or is_torch_zip(begins):
        return "torch"
    if safetensors.is_safetensors(begins):
        return "safetensors"
    if not _is_ours(path):
        return None
    return "zarr-zip" if begins.startswith(b"PK") else "hdf5"


def _is_ours(path: Path) -> bool:
    try:
        source = open_source(str(path))
    except DcpZarrError:
        return False
    source.close()
    return not source.schema.is_foreign


def holds_hdf5(path: str) -> bool:
    """Say whether a path leads to an HDF5 file."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"\x89HDF"
