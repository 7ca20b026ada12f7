"""One conversion: what is written, compared and shown, in this order."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from dcp_zarr import object_forms, verification
from dcp_zarr.checkpoint import Checkpoint
from dcp_zarr.codecs import CompressionRules
from dcp_zarr.containers.by_path import allowed, new_target, open_source
from dcp_zarr.destinations import OURS, holds_hdf5
from dcp_zarr.errors import (
    DcpZarrError,
    SaveError,
    TensorNotFoundError,
    UnsupportedTensorError,
)
from dcp_zarr.layout_rules import READ_CHUNK_BYTES, LayoutOptions
from dcp_zarr.placement import SaveOptions
from dcp_zarr.rewriting import Rewriting, StoredAs, write_container
from dcp_zarr.safetensors_export import export
from dcp_zarr.safetensors_format import NAMES
from dcp_zarr.tasks import check_count

if TYPE_CHECKING:
    from dcp_zarr.codecs import CompressionOption
    from dcp_zarr.container import Source
    from dcp_zarr.destinations import Destination
    from dcp_zarr.schema import Schema
    from dcp_zarr.tasks import Limits

_NAMED = 10
"""So many names stand in a message."""


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion wrote."""

    path: str
    """Where it is."""
    format: str
    """Its format, as `convert` takes it."""
    tensors: int
    """How many tensors are in it."""
    objects: int
    """How many objects are in it."""
    nbytes: int
    """Uncompressed bytes of the tensors."""
    copied: int
    """How many of the tensors were copied as they were stored, not compressed anew."""
    left_out: Mapping[str, str]
    """FQNs of what the format cannot hold, and why; always empty without `allow_loss`."""
    separated: tuple[tuple[str, ...], ...]
    """FQNs of tensors that share bytes in the source, together; each has its own now."""
    keys_as_text: tuple[str, ...]
    """Names of dicts whose keys were no text in a file of ``torch.save``, and are now."""

    def __repr__(self) -> str:
        """Count what was written and what not: names may be thousands."""
        return (
            f"ConversionReport: {self.tensors} tensors and {self.objects} objects in "
            f"{self.path!r} ({self.format}), left out: {len(self.left_out)}"
        )


@dataclass(frozen=True, slots=True)
class StoredHow:
    """What is asked for of a container of ours."""

    rules: CompressionRules | None
    """How tensors are compressed; None where that is kept."""
    read_chunk_bytes: int | None
    """Wanted size of read chunks; None where they are kept."""

    @classmethod
    def of(
        cls, compression: CompressionOption | Literal["keep"], read_chunk_bytes: int | None
    ) -> StoredHow:
        """Check the options.

        Raises
        ------
        OptionError
            If one cannot be used.
        """
        if read_chunk_bytes is not None:
            check_count("read_chunk_bytes", read_chunk_bytes, most=1 << 30)
        rules = None if compression == "keep" else CompressionRules.parse(compression)
        return cls(rules, read_chunk_bytes)


class Conversion:
    """One conversion.

    Parameters
    ----------
    source
        Where the values are.
    schema
        What of it is wanted.
    destined
        Where it goes.
    how
        How it is stored, in a container of ours.
    limits
        Threads and memory.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        destined: Destination,
        how: StoredHow,
        limits: Limits,
    ) -> None:
        self._source = source
        self._schema = schema
        self._destined = destined
        self._how = how
        self._limits = limits
        self._copied: list[str] = []
        self._done = 0
        self._progress: Callable[[int], None] = lambda _: None

    def run(
        self, progress: Callable[[int, int], None] | None, *, allow_loss: bool, verify: bool
    ) -> ConversionReport:
        """Write, compare and show; leave nothing where that fails."""
        objects, left_out = self._held()
        if left_out and not allow_loss:
            raise self._cannot_hold(left_out)
        self._schema = self._schema.only({e.fqn for e in self._schema.entries} - {*left_out})
        if not self._schema.entries:
            raise TensorNotFoundError(f"Nothing of {self._source.where!r} is left to convert.")
        nbytes = sum(entry.array.nbytes for entry in self._schema.tensors.values())
        if progress is not None:
            self._report_to(progress, nbytes * (1 + verify))
        destined = self._destined
        try:
            destined.commit.prepare(sync=True)
            self._write(objects)
            if verify:
                self._compare()
            destined.show()
        except BaseException as error:
            destined.commit.discard()
            if isinstance(error, DcpZarrError) or not isinstance(error, OSError):
                raise
            raise SaveError(
                f"The conversion to {destined.path!r} was given up, and left nothing behind: "
                f"{error}.",
                path=destined.path,
            ) from error
        return ConversionReport(
            destined.path,
            destined.format,
            len(self._schema.tensors),
            len(self._schema.objects),
            nbytes,
            len(self._copied),
            left_out,
            self._separated(),
            self._schema.keys_as_text,
        )

    def _report_to(self, progress: Callable[[int, int], None], total: int) -> None:
        def wrote(nbytes: int) -> None:
            self._done = min(self._done + nbytes, total)  # read chunks may overhang
            progress(self._done, total)

        self._progress = wrote

    def _separated(self) -> tuple[tuple[str, ...], ...]:
        kept = (tuple(f for f in g if f in self._schema.tensors) for g in self._schema.shared)
        return tuple(group for group in kept if len(group) > 1)

    def _held(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return objects as the destination holds them, and what it cannot hold, with reasons."""
        left_out = {
            fqn: f"{entry.refused}, which only running code could make"
            for fqn, entry in self._schema.objects.items()
            if entry.refused
        }
        if self._destined.format.startswith("safetensors"):
            left_out |= dict.fromkeys(self._schema.objects, "an object")
            for fqn, entry in self._schema.tensors.items():
                if entry.dtype.torch_name not in NAMES:
                    left_out[fqn] = f"a tensor of {entry.dtype.torch_name}"
            return {}, left_out
        wanted = [o for o in self._schema.objects.values() if not o.refused]
        read = object_forms.read_all(self._source, wanted)
        if self._destined.format in OURS:
            return dict(object_forms.as_stored(read, is_foreign=self._schema.is_foreign)), left_out
        if self._destined.format == "dcp":
            return dict(object_forms.payloads(read)), left_out
        values = {}
        for fqn, value, reason in object_forms.values(read):
            if reason:
                left_out[fqn] = reason
            else:
                values[fqn] = value
        return values, left_out

    def _cannot_hold(self, left_out: Mapping[str, str]) -> UnsupportedTensorError:
        some = list(left_out.items())[:_NAMED]
        listed = ", ".join(f"{fqn!r} ({reason})" for fqn, reason in some)
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        return UnsupportedTensorError(
            f"{self._destined.path!r}, of format {self._destined.format!r}, cannot hold {listed}"
            f"{more} of {self._source.where!r}. Nothing was written. Pass allow_loss=True "
            "(--allow-loss) to leave them out, or a pattern that selects others.",
            fqn=some[0][0],
            path=self._source.where,
        )

    def _write(self, objects: Mapping[str, Any]) -> None:
        made = str(self._destined.made)
        arguments = self._source, self._schema, objects, self._limits, self._progress
        if self._destined.format in OURS:
            self._write_ours(made, objects)
        elif self._destined.format == "dcp":
            from dcp_zarr import torch_destinations  # noqa: PLC0415

            final_path = str(self._destined.commit.path)
            torch_destinations.write_directory(made, *arguments, final_path=final_path)
        elif self._destined.format == "torch":
            from dcp_zarr import torch_destinations  # noqa: PLC0415

            torch_destinations.write_file(made, *arguments)
        else:
            written = 0

            def progress(so_far: int, _: int) -> None:
                nonlocal written
                self._progress(so_far - written)
                written = so_far

            chosen = Checkpoint(self._source, {*self._schema.tensors})
            export(chosen, made, thread_count=self._limits.thread_count, progress=progress)

    def _write_ours(self, made: str, objects: Mapping[str, StoredAs]) -> None:
        how, schema, hdf5 = self._how, self._schema, self._destined.format == "hdf5"
        kept = not schema.is_foreign and holds_hdf5(self._source.where) == hdf5
        rules = how.rules or CompressionRules.parse("small" if hdf5 else "fast")
        layout = LayoutOptions(how.read_chunk_bytes or READ_CHUNK_BYTES, shared_objects=False)
        options = allowed(
            SaveOptions(rules, layout, "native"),
            made,
            hdf5=hdf5,
            memory_budget_bytes=self._limits.memory_budget_bytes,
        )
        told = {
            **(schema.storage_meta or {}),
            "checkpoint_id": str(self._destined.commit.path),
            "save_id": str(uuid.uuid4()),
        }
        self._copied = write_container(
            new_target(made, hdf5=hdf5, overwrite=False, sync=True),
            self._source,
            replace(
                schema,
                save_id=told["save_id"],
                storage_meta=told,
                producer={"dcp_zarr": version("dcp_zarr")},
                documents={},
            ),
            objects,
            Rewriting(
                options,
                keeps_codecs=kept and how.rules is None,
                keeps_read_chunks=not schema.is_foreign and how.read_chunk_bytes is None,
            ),
            self._limits,
            self._progress,
        )

    def _compare(self) -> None:
        """Raise unless the destination holds what the source does."""
        made = open_source(str(self._destined.made))
        try:
            wanted, found = self._schema.tensors, made.schema.tensors
            sources = self._source, made
            compared = verification.check_same(wanted, found, sources, self._limits, self._copied)
            for nbytes in compared:
                self._progress(nbytes)
        finally:
            made.close()
