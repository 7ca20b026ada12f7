"""`export`: a checkpoint's tensors as safetensors files, streamed and without torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_zarr import display
from dcp_zarr.commit import LocalCommit
from dcp_zarr.errors import (
    CheckpointExistsError,
    DcpZarrError,
    OptionError,
    SaveError,
    TensorNotFoundError,
    UnsupportedTensorError,
)
from dcp_zarr.local_files import local_path, sync_directory, sync_path
from dcp_zarr.opening import opened
from dcp_zarr.safetensors_file import NamedTensor, split, write_file
from dcp_zarr.safetensors_format import INDEX, METADATA_NAME, NAMES, is_file_of_directory
from dcp_zarr.tasks import Limits, check_count

if TYPE_CHECKING:
    from dcp_zarr.checkpoint import Checkpoint
    from dcp_zarr.container import Source

FILE_BYTES = 5 << 30
"""Default for the most bytes of tensors in each file of a directory."""

_SUFFIX = ".safetensors"
_STAGED = "dcp_zarr-export"
"""Name of the file in a directory for which an export stages its own."""
_NAMED = 3
"""So many names stand in a message."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    files: tuple[str, ...]
    """Paths of the files; the index of a directory is the last."""
    tensors: Mapping[str, str]
    """For the FQN of each tensor in them, its name there."""
    left_out: tuple[str, ...]
    """FQNs of what is not in them: objects, and tensors that `names` left out."""

    def __repr__(self) -> str:
        """Count what was written and what not: names may be thousands."""
        files = repr(self.files[-1]) if len(self.files) == 1 else f"{len(self.files)} files"
        return (
            f"ExportReport: {len(self.tensors)} tensors in {files}, left out: {len(self.left_out)}"
        )


def export(
    checkpoint: Checkpoint | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    pattern: str = "",
    *,
    names: Callable[[str], str | None] | None = None,
    file_bytes: int | None = None,
    overwrite: bool = False,
    thread_count: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a checkpoint's tensors as safetensors, as vLLM and transformers want them. No torch.

    They are streamed: each thread holds about 8 MiB of values, or a read chunk that is larger.
    Checksums are checked. Files appear when all are complete and durable; an export that fails
    before leaves what was there, and nothing else.

    Parameters
    ----------
    checkpoint
        The checkpoint, or its path.
    destination
        A path that ends in ``.safetensors`` becomes one file. Any other becomes a directory as
        Hugging Face has it: ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so
        on with ``model.safetensors.index.json``. Other files there stay.
    pattern
        Name or pattern of what to export; all by default.
    names
        Gives the name in the files for each FQN, or None to leave it out.
    file_bytes
        Most bytes of tensors in each file of a directory; 5 GiB by default. A larger tensor gets a
        file of its own.
    overwrite
        Whether to replace what an earlier export wrote.
    thread_count
        Worker threads; by default this process' share of the cores.
    progress
        Called in this thread with the bytes written so far and with those of all.

    Raises
    ------
    TensorNotFoundError
        If no tensor is selected.
    UnsupportedTensorError
        If safetensors has no word for a dtype.
    OptionError
        If two tensors would have one name, or an option cannot be used.
    CheckpointExistsError
        If something stands at the destination that must not be replaced.
    CorruptionError
        If stored bytes are lost or changed.
    SaveError
        If the files cannot be written, such as on a full disk.

    Examples
    --------
    >>> import torch
    >>> _ = save({"model": {"w": torch.ones(4)}, "step": 7}, "step-1.zarr")
    >>> export("step-1.zarr", "w.safetensors", names=lambda fqn: fqn.removeprefix("model."))
    ExportReport: 1 tensors in 'w.safetensors', left out: 1
    """
    with opened(checkpoint) as whole:
        chosen = whole.select(pattern)
        named = _named(chosen, names)
        destined = _Destination.of(local_path(destination), file_bytes)
        destined.check(sum(tensor.nbytes for tensor in named), overwrite=overwrite)
        limits = Limits.of(thread_count)
        files = destined.write(named, chosen._source, limits, progress or _silent)
    exported = {tensor.entry.fqn: tensor.name for tensor in named}
    left_out = tuple(fqn for fqn in [*chosen, *chosen.objects] if fqn not in exported)
    return ExportReport(files, exported, left_out)


def _silent(written: int, nbytes: int) -> None:
    """Show no progress."""


def _named(chosen: Checkpoint, names: Callable[[str], str | None] | None) -> list[NamedTensor]:
    """Return the tensors to export, by their new names.

    Raises
    ------
    OptionError, TensorNotFoundError, UnsupportedTensorError
        If there is none, if two have one name, or if safetensors cannot hold one.
    """
    named: dict[str, NamedTensor] = {}
    for fqn, entry in chosen._entries.items():
        name = names(fqn) if names else fqn
        if name is None:
            continue
        if name == METADATA_NAME:
            raise OptionError(f"names gives {name!r} for {fqn!r}, which is no name of a tensor.")
        tensor = named.setdefault(name, NamedTensor(name, entry))
        if tensor.entry is not entry:
            raise OptionError(
                f"{tensor.entry.fqn!r} and {fqn!r} would both be named {name!r}: change names, or "
                "have it give None for one of them."
            )
    if not named:
        raise TensorNotFoundError(f"No tensor of {chosen.path!r} is selected; nothing to export.")
    _check_dtypes(named.values())
    return list(named.values())


def _check_dtypes(named: Iterable[NamedTensor]) -> None:
    refused = [t.entry for t in named if t.entry.dtype.torch_name not in NAMES]
    if not refused:
        return
    listed = ", ".join(f"{e.fqn!r} ({e.dtype.torch_name})" for e in refused[:_NAMED])
    more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    raise UnsupportedTensorError(
        f"safetensors cannot hold the dtype of {listed}{more}. Have names give None for what to "
        "leave out, or select a part.",
        fqn=refused[0].fqn,
    )


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the files go: one file, or a directory of them, which others may use too."""

    path: str
    """As it was given."""
    commit: LocalCommit
    """How they appear; in a directory, for a file that never does."""
    file_bytes: int | None
    """Most bytes of a file in a directory; None for one file that is the path itself."""

    @classmethod
    def of(cls, path: str, file_bytes: int | None) -> _Destination:
        if file_bytes is not None:
            check_count("file_bytes", file_bytes)
        if not path.lower().endswith(_SUFFIX):
            return cls(path, LocalCommit(Path(path, _STAGED)), file_bytes or FILE_BYTES)
        if file_bytes is None:
            return cls(path, LocalCommit(path), None)
        raise OptionError(
            f"file_bytes parts tensors into files of a directory, but {path!r} names one file. "
            f"Give a path without {_SUFFIX}."
        )

    @property
    def folder(self) -> Path:
        """The directory that files go to."""
        return self.commit.path.parent

    def check(self, nbytes: int, *, overwrite: bool) -> None:
        """Raise where the destination must not be replaced, or its disk is too small."""
        if self.file_bytes is None:
            is_taken, is_replaceable = self.commit.path.exists(), self.commit.path.is_file()
        else:
            is_taken, is_replaceable = self.folder.exists(), self.folder.is_dir()
            if is_replaceable:
                is_taken = any(is_file_of_directory(file.name) for file in self.folder.iterdir())
        if (is_taken and not is_replaceable) or (self.folder / "zarr.json").exists():
            raise CheckpointExistsError(
                f"{self.path!r} is nothing that an export may replace: choose another path.",
                path=self.path,
            )
        if is_taken and not overwrite:
            raise CheckpointExistsError(
                f"{self.path!r} exists: choose another path, or pass overwrite=True (--overwrite).",
                path=self.path,
            )
        disk = next(folder for folder in self.commit.path.parents if folder.exists())
        free = shutil.disk_usage(disk).free
        if nbytes > free:
            raise SaveError(
                f"The export takes {display.size(nbytes)}, but at {str(disk)!r} are only "
                f"{display.size(free)} free. Nothing was written.",
                path=self.path,
            )

    def write(
        self,
        named: Sequence[NamedTensor],
        source: Source,
        limits: Limits,
        progress: Callable[[int, int], None],
    ) -> tuple[str, ...]:
        """Write all files, then show them; return their paths. Leave nothing where that fails."""
        nbytes, written = sum(tensor.nbytes for tensor in named), 0
        files, is_new = self._files(named), not self.folder.exists()
        try:
            self.commit.prepare(sync=True)
            for name, tensors in files.items():
                for count in write_file(self.commit.partial / name, tensors, source, limits):
                    written += count
                    progress(written, nbytes)
            return self._show(files, nbytes)
        except BaseException as error:
            self.commit.discard()
            if is_new:
                with suppress(OSError):
                    self.folder.rmdir()
            if isinstance(error, DcpZarrError) or not isinstance(error, OSError):
                raise
            raise SaveError(
                f"The export to {self.path!r} was given up, and left nothing behind: {error}.",
                path=self.path,
            ) from error

    def _files(self, named: Sequence[NamedTensor]) -> dict[str, list[NamedTensor]]:
        parts = split(named, self.file_bytes)
        if self.file_bytes is None:
            return {self.commit.path.name: parts[0]}
        if len(parts) == 1:
            return {f"model{_SUFFIX}": parts[0]}
        count = f"of-{len(parts):05}{_SUFFIX}"
        return {f"model-{number:05}-{count}": part for number, part in enumerate(parts, start=1)}

    def _show(self, files: Mapping[str, list[NamedTensor]], nbytes: int) -> tuple[str, ...]:
        """Give the files their places; return their paths."""
        if self.file_bytes is None:
            self.commit.commit_file(self.commit.path.name, sync=True)
            return (self.path,)
        shown = list(files)
        if len(files) > 1:
            weight_map = {tensor.name: name for name, part in files.items() for tensor in part}
            index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            written = self.commit.partial / INDEX
            written.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")
            sync_path(written)
            shown.append(INDEX)
        self.commit.check_unchanged()
        # Without an index, and until the new one is there, nothing takes old and new for one model.
        for old in sorted(self.folder.iterdir(), key=lambda file: file.name != INDEX):
            if is_file_of_directory(old.name):
                old.unlink()
        for name in shown:
            (self.commit.partial / name).rename(self.folder / name)
        sync_directory(self.folder)
        self.commit.discard()
        return tuple(str(Path(self.path, name)) for name in shown)
