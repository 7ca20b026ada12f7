"""``dcp-zarr``: look into checkpoints from a shell. Knows no torch."""

from __future__ import annotations

import gc
import os
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from dcp_zarr import cli_convert
from dcp_zarr.cli_words import AsJson, Path, Pattern, bar, json_of, number_of_bytes, print_json
from dcp_zarr.errors import DcpZarrError, OptionError
from dcp_zarr.garbage import no_collection
from dcp_zarr.opening import open_checkpoint

if TYPE_CHECKING:
    from dcp_zarr.checkpoint import Checkpoint
    from dcp_zarr.table import Table

app = typer.Typer(
    help="Look into checkpoints, and convert them: dcp_zarr's, torch's own, and safetensors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Older = Annotated[str, typer.Argument(help="The older checkpoint.")]
Newer = Annotated[str, typer.Argument(help="The newer checkpoint.")]
What = Annotated[
    str, typer.Argument(help="Name, with a slice behind it if wanted, as in numpy: 'w[:2, -1]'.")
]
Reread = Annotated[bool, typer.Option("--read", help="Read values even if these are stored.")]
StripPrefix = Annotated[str, typer.Option(help="Taken off names, such as model.")]
Sort = Annotated[str, typer.Option(help="Column to sort by, largest first.")]
_SLICE_PARTS = 3


@app.command()
def ls(
    path: Path,
    pattern: Pattern = "",
    every: Annotated[bool, typer.Option("--all", help="A line for every tensor.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """List tensors and objects as a tree, equal layers in one line; no values are read.

    Example: dcp-zarr ls step-1000.zarr model.layers.0
    """
    with no_collection(), _opened(path, pattern) as checkpoint:
        if as_json:
            print_json([_row(checkpoint, fqn) for fqn in checkpoint])
        else:
            tree = checkpoint.tree()
            typer.echo(str(tree) if every else tree.folded())


@app.command()
def show(path: Path, what: What, as_json: AsJson = False) -> None:  # noqa: FBT002
    """Print an object, a tensor, or a slice of it; no more is read.

    Example: dcp-zarr show step-1000.zarr 'model.embed.weight[:2, :4]'
    """
    with open_checkpoint(path) as checkpoint:
        fqn, index = _parsed(what, checkpoint)
        if fqn in checkpoint.objects:
            value = checkpoint.objects[fqn]
            typer.echo(json_of(value) if as_json else repr(value))
            return
        try:
            values = checkpoint[fqn].numpy(index)
        except IndexError as error:
            raise OptionError(str(error)) from error
        if as_json:
            print_json(values.astype(_plain(values.dtype)).tolist())
        else:
            typer.echo(f"{fqn} {checkpoint[fqn].torch_dtype} {list(values.shape)}\n{values}")


@app.command()
def stats(
    path: Path,
    pattern: Pattern = "",
    sort: Sort = "",
    read: Reread = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Say what the values of tensors are like; reads all that were saved without statistics.

    Example: dcp-zarr stats step-1000.zarr '**.weight' --sort abs_max
    """
    with _opened(path, pattern) as checkpoint:
        table = checkpoint.stats(stored=not read, progress=True)
    _print_table(table.sorted_by(sort) if sort else table, as_json=as_json)


@app.command()
def diff(
    old: Older,
    new: Newer,
    pattern: Pattern = "",
    sort: Sort = "",
    strip_prefix: StripPrefix = "",
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Compare two checkpoints, tensor by tensor; exits with 1 where they differ.

    Where a prefix is stripped, the pattern selects from the older one alone.

    Example: dcp-zarr diff step-900.zarr step-1000.zarr model --sort relative_norm
    """
    with (
        _opened(old, pattern) as first,
        _opened(new, "" if strip_prefix else pattern) as second,
    ):
        table = first.diff(second, names=lambda fqn: fqn.removeprefix(strip_prefix))
    table = table.sorted_by(sort) if sort else table
    differing = table.where(lambda row: row.change != "equal")
    if as_json:
        print_json(table.to_dicts())
    elif differing:
        typer.echo(differing.to_text())
        if all(row.change in ("added", "removed") for row in table):
            typer.echo("No name is in both: --strip-prefix takes off what one lacks.", err=True)
    else:
        typer.echo(f"All {len(table)} tensors are equal, bit for bit.")
    raise typer.Exit(1 if differing else 0)


@app.command()
def verify(path: Path, as_json: AsJson = False) -> None:  # noqa: FBT002
    """Check every stored byte; exits with 1 and a list where any is lost or changed.

    What others saved has no checksums: only what is lost is found there.

    Example: dcp-zarr verify step-1000.zarr
    """
    with open_checkpoint(path) as checkpoint:
        damage = checkpoint.verify()
        if as_json:
            print_json([str(found) for found in damage])
        else:
            for found in damage:
                typer.echo(str(found))
            typer.echo(f"{path}: {len(damage) or 'no'} damage in {len(checkpoint)} tensors.")
            if not checkpoint.has_checksums:
                typer.echo("All bytes are counted, but it has no checksums: a change is not seen.")
    raise typer.Exit(1 if damage else 0)


@app.command()
def export(
    path: Path,
    destination: Annotated[str, typer.Argument(help="A path in .safetensors, or a directory.")],
    pattern: Pattern = "",
    strip_prefix: StripPrefix = "",
    file_bytes: Annotated[
        str, typer.Option(help="Most bytes of each file of a directory, such as 5GB or 5GiB.")
    ] = "",
    overwrite: Annotated[bool, typer.Option(help="Replace what an earlier export wrote.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Write tensors as safetensors: one file, or a directory as Hugging Face has it.

    Example: dcp-zarr export step-1000.zarr out.safetensors model --strip-prefix model.
    """
    from dcp_zarr.safetensors_export import export as write  # noqa: PLC0415

    with bar("writing") as progress:
        report = write(
            path,
            destination,
            pattern,
            names=lambda fqn: fqn.removeprefix(strip_prefix),
            file_bytes=number_of_bytes(file_bytes) if file_bytes else None,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        print_json(asdict(report))
        return
    typer.echo(f"{len(report.tensors)} tensors in {', '.join(report.files)}")
    if report.left_out:
        some = ", ".join(report.left_out[:5])
        typer.echo(f"Left out {len(report.left_out)} that are no tensors, such as {some}")


@app.command()
def report(
    path: Path,
    output: Annotated[str, typer.Option("--output", "-o", help="Where to write; ends in .html.")],
    compare: Annotated[str, typer.Option(help="An older checkpoint.")] = "",
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Write one page about a checkpoint, with tables and pictures; reads all values.

    Example: dcp-zarr report step-1000.zarr -o report.html --compare step-900.zarr
    """
    from dcp_zarr.progress import tracked  # noqa: PLC0415
    from dcp_zarr.reporting import write_report  # noqa: PLC0415

    write_report(path, output, compare or None, tracked=tracked)
    if as_json:
        print_json({"output": output})


app.command()(cli_convert.convert)
app.command()(cli_convert.repack)


@app.command()
def clean(
    folder: Annotated[str, typer.Argument(help="The directory in which checkpoints stand.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is left over.")] = False,  # noqa: FBT002
    idle_hours: Annotated[
        float, typer.Option(help="Keep what was changed fewer hours ago.", min=0.0)
    ] = 24.0,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """List what dead saves left in a directory; with --delete, remove it.

    A save that runs on this host is known by its lock. One on another host may not be: where hosts
    share the directory, let --idle-hours be longer than any save takes.

    Example: dcp-zarr clean runs/ --delete
    """
    from dcp_zarr.cleaning import clean as cleaned  # noqa: PLC0415

    _print_table(cleaned(folder, delete=delete, idle_s=idle_hours * 3600), as_json=as_json)


def main() -> None:
    """Run the command line; errors of ours are one line on standard error."""
    gc.freeze()  # modules stay: to look for cycles in them takes 50 ms
    try:
        app()
    except DcpZarrError as error:
        typer.echo(f"dcp-zarr: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(141)


def _opened(path: str, pattern: str) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    return checkpoint.select(pattern) if pattern else checkpoint


def _parsed(what: str, checkpoint: Checkpoint) -> tuple[str, Any]:
    """Split a name with a slice behind; names may hold brackets themselves."""
    if what in checkpoint or what in checkpoint.objects:
        return what, ...
    found = re.fullmatch(r"(.*)\[([^\[\]]*)\]", what, re.DOTALL)
    if found is None:
        return what, ...
    return found[1], tuple(_axis(text.strip(), what) for text in found[2].split(","))


def _axis(text: str, what: str) -> Any:  # noqa: ANN401
    if text == "...":
        return ...
    numbers = text.split(":")
    are_numbers = all(re.fullmatch(r"\s*(-?\d+)?\s*", number) for number in numbers)
    if len(numbers) > _SLICE_PARTS or not are_numbers:
        raise OptionError(f"{text!r} in {what!r} is no index; write it as in numpy: [:2, -1, ...].")
    found = [int(number) if number.strip() else None for number in numbers]
    if len(found) > 1:
        return slice(*found)
    if found[0] is None:
        raise OptionError(f"{what!r} has an empty index.")
    return found[0]


def _row(checkpoint: Checkpoint, fqn: str) -> dict[str, Any]:
    tensor = checkpoint[fqn]
    return {
        "fqn": fqn,
        "dtype": tensor.torch_dtype,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "stored_nbytes": tensor.stored_nbytes,
    }


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of numpy that holds the values of one of ml_dtypes."""
    return dtype if dtype.kind != "V" else np.dtype(np.float32)


def _print_table(table: Table[Any], *, as_json: bool) -> None:
    if as_json:
        print_json(table.to_dicts())
    else:
        typer.echo(table.to_text())
