"""``dcp-zarr convert`` and ``dcp-zarr repack``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_zarr.cli_words import AsJson, Path, Pattern, bar, number_of_bytes, print_json
from dcp_zarr.errors import OptionError

if TYPE_CHECKING:
    from dcp_zarr.conversion import ConversionReport

Compression = Annotated[
    str, typer.Option(help="In a container of ours: keep, none, fast or small.")
]
ReadChunkBytes = Annotated[str, typer.Option(help="Wanted size of read chunks, such as 1MiB.")]
Verify = Annotated[bool, typer.Option(help="Read all of both, and compare.")]


def convert(
    path: Path,
    destination: Annotated[str, typer.Argument(help="Where to; its suffix tells the format.")],
    pattern: Pattern = "",
    to: Annotated[
        str, typer.Option(help="The format where no suffix tells: dcp, safetensors-directory, ...")
    ] = "",
    compression: Compression = "keep",
    read_chunk_bytes: ReadChunkBytes = "",
    allow_loss: Annotated[bool, typer.Option(help="Leave out what it cannot hold.")] = False,  # noqa: FBT002
    overwrite: Annotated[bool, typer.Option(help="Replace one of the same format.")] = False,  # noqa: FBT002
    verify: Verify = True,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Write a checkpoint in another format, bit for bit, and compare the two.

    Example: dcp-zarr convert pytorch_model.bin model.zarr
    """
    from dcp_zarr.converting import convert as write  # noqa: PLC0415

    with bar("converting") as progress:
        converted = write(
            path,
            destination,
            pattern,
            to=to or None,
            compression=_compression(compression),
            read_chunk_bytes=number_of_bytes(read_chunk_bytes) if read_chunk_bytes else None,
            allow_loss=allow_loss,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
        )
    _print_converted(converted, as_json=as_json)


def repack(
    path: Path,
    keep: Annotated[str, typer.Option(help="Name or pattern of what stays.")] = "",
    compression: Compression = "keep",
    read_chunk_bytes: ReadChunkBytes = "",
    verify: Verify = True,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Store a checkpoint of dcp_zarr anew, in its place, and compare the two.

    Example: dcp-zarr repack step-1000.zarr --keep model --compression small
    """
    from dcp_zarr.converting import repack as write  # noqa: PLC0415

    with bar("repacking") as progress:
        converted = write(
            path,
            keep=keep,
            compression=_compression(compression),
            read_chunk_bytes=number_of_bytes(read_chunk_bytes) if read_chunk_bytes else None,
            verify=verify,
            progress=progress,
        )
    _print_converted(converted, as_json=as_json)


def _compression(text: str) -> Any:  # noqa: ANN401
    if text not in ("keep", "none", "fast", "small"):
        raise OptionError(f"--compression {text}: it is none of keep, none, fast and small.")
    return None if text == "none" else text


def _print_converted(converted: ConversionReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(converted))
        return
    typer.echo(f"{converted.tensors} tensors, {converted.objects} objects in {converted.path}")
    for fqn, reason in converted.left_out.items():
        typer.echo(f"Left out {fqn}: {reason}")
    for fqns in converted.separated:
        typer.echo(f"Shared bytes, and have their own now: {', '.join(fqns)}")
    for name in converted.keys_as_text:
        typer.echo(f"Keys that were no text are text now, in {name or 'the whole'}")
