"""``dcp-zarr``, as it is called from a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import dcp_zarr
from dcp_zarr import cli, cli_words


@pytest.fixture(autouse=True)
def saved(path):
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b[0]": torch.ones(2).bfloat16()}}
    dcp_zarr.save({**state, "step": 7, "nan": torch.tensor(float("nan"))}, path)


def run(*arguments, code=0):
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_ls_draws_the_tree(path):
    listed = run("ls", path)
    assert "4.0 B" not in listed
    assert "w  float32 [3, 4]" in listed
    assert "step  7" in listed
    assert "step" not in run("ls", path, "model")


def test_ls_folds_layers_unless_told():
    dcp_zarr.save({f"layers.{n}.w": torch.zeros(2) for n in range(3)}, "layers.zarr")
    assert "layers.[0-2].w ×3" in run("ls", "layers.zarr")
    assert "├── 1  1 tensor" in run("ls", "layers.zarr", "--all")
    assert run("ls", "layers.zarr", "layers.[1-2]").startswith("Checkpoint layers.zarr: 2 tensors")


def test_ls_as_json(path):
    rows = json.loads(run("ls", path, "model", "--json"))
    assert rows[0] | {"stored_nbytes": 0} == {
        "fqn": "model.w", "dtype": "float32", "shape": [3, 4], "nbytes": 48, "stored_nbytes": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("model.w[1]", [4, 5, 6, 7]),
        ("model.w[:2, -1]", [3, 7]),
        ("model.w[::2,1:3]", [[1, 2], [9, 10]]),
        ("model.w[..., 0]", [0, 4, 8]),
        ("model.b[0]", [1, 1]),
        ("model.b[0][1]", 1),
        ("step", 7),
        ("nan", None),
    ],
)
def test_show_prints_a_slice(what, expected, path):
    assert json.loads(run("show", path, what, "--json")) == expected


def test_show_prints_for_people(path):
    assert run("show", path, "model.w[0]") == "model.w float32 [4]\n[0. 1. 2. 3.]\n"
    assert run("show", path, "step") == "7\n"


def test_stats_and_their_order(path):
    rows = json.loads(run("stats", path, "--json"))
    assert [row["fqn"] for row in rows] == ["model.w", "model.b[0]", "nan"]
    assert rows[2]["mean"] is None
    assert run("stats", path, "--sort", "nans").splitlines()[2].startswith("nan")


def test_tables_have_every_row():
    dcp_zarr.save({f"w{n}": torch.full((2,), float(n)) for n in range(70)}, "many.zarr")
    dcp_zarr.save({f"w{n}": torch.zeros(2) for n in range(70)}, "zeros.zarr")
    assert len(run("stats", "many.zarr").splitlines()) == 2 + 70
    rows = run("diff", "zeros.zarr", "many.zarr", "--sort", "max_abs", code=1).splitlines()[2:]
    assert [row.split()[0] for row in rows] == [f"w{n}" for n in range(69, 0, -1)]


def test_stats_reads_what_is_stored_only_when_told():
    dcp_zarr.save({"w": torch.ones(3)}, "with.zarr", statistics=True)
    stored = run("stats", "with.zarr")
    assert run("stats", "with.zarr", "--read") == stored
    next(Path("with.zarr/w").glob("c*")).unlink()
    assert run("stats", "with.zarr") == stored
    run("stats", "with.zarr", "--read", code=1)


def test_diff_tells_what_differs_and_exits_with_1(path):
    other = f"other-{path}"
    dcp_zarr.save({"model": {"w": torch.zeros(3, 4)}}, other)
    assert "values" in run("diff", path, other, "model.w", code=1)
    rows = json.loads(run("diff", path, other, "model", "--json", code=1))
    assert {row["fqn"]: row["change"] for row in rows} == {
        "model.w": "values",
        "model.b[0]": "removed",
    }
    assert "All 3 tensors are equal" in run("diff", path, path)


def test_diff_compares_with_what_was_exported_without_a_prefix(path):
    run("export", path, "out.safetensors", "model", "--strip-prefix", "model.")
    assert "No name is in both" in run("diff", path, "out.safetensors", code=1)
    told = run("diff", path, "out.safetensors", "model", "--strip-prefix", "model.")
    assert told == "All 2 tensors are equal, bit for bit.\n"


def test_export_writes_safetensors(path):
    said = run("export", path, "out.safetensors", "--strip-prefix", "model.")
    assert said.splitlines() == [
        "3 tensors in out.safetensors",
        "Left out 1 that are no tensors, such as step",
    ]
    assert set(load_file("out.safetensors")) == {"w", "b[0]", "nan"}


def test_export_as_json_of_a_part_in_several_files(path):
    report = json.loads(run("export", path, "out", "model", "--file-bytes", "50B", "--json"))
    assert report["tensors"] == {"model.w": "model.w", "model.b[0]": "model.b[0]"}
    assert len(report["files"]) == 3
    assert "out/model-00001-of-00002.safetensors" in run(
        "export", path, "out", "model", "--file-bytes", "50", "--overwrite"
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("5GiB", 5 << 30), ("70", 70), ("2 kb", 2000), ("3mib", 3 << 20)],
)
def test_numbers_of_bytes_are_read_as_people_write_them(text, nbytes):
    assert cli_words.number_of_bytes(text) == nbytes


def test_verify_lists_damage_and_exits_with_1(path, monkeypatch):
    assert "no damage in 3 tensors" in run("verify", path)
    monkeypatch.setattr(
        dcp_zarr.Checkpoint, "verify", lambda _: [dcp_zarr.Damage("w", None, "broken")]
    )
    assert "broken" in run("verify", path, code=1)
    assert json.loads(run("verify", path, "--json", code=1)) == ["w None: broken"]


def test_verify_says_where_there_are_no_checksums(path):
    assert "no checksums" not in run("verify", path)
    torch.save({"w": torch.ones(3)}, "x.pt")
    assert "it has no checksums: a change is not seen" in run("verify", "x.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nowhere.zarr"], "There is no checkpoint at"),
        (["show", "PATH", "modle.w"], "Nothing in"),
        (["show", "PATH", "model.w[a]"], "'a' in 'model.w[a]' is no index"),
        (["show", "PATH", "model.w[]"], "'model.w[]' has an empty index"),
        (["show", "PATH", "model.w[3]"], "Index 3 is out of range for an axis of 3 of 'model.w'"),
        (["show", "PATH", "model.w[0, 0, 0]"], "has too many indices"),
        (["stats", "PATH", "--sort", "size"], "There is no column 'size'"),
        (["export", "PATH", "out", "--file-bytes", "5XB"], "'5XB' is no number of bytes"),
        (["export", "PATH", "PATH"], "is nothing that an export may replace"),
        (["report", "PATH", "-o", "PATH"], "does not end in .html"),
    ],
)
def test_errors_are_one_line_and_no_traceback(arguments, message, path):
    command = [path if argument == "PATH" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", "from dcp_zarr.cli import main; main()", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dcp-zarr: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_report_writes_one_page(path, tmp_path):
    assert run("report", path, "-o", "report.html") == ""
    assert "model.w" in (tmp_path / "report.html").read_text()
    assert "compared with" not in (tmp_path / "report.html").read_text()
    told = run("report", path, "-o", "report.html", "--compare", path, "--json")
    assert json.loads(told) == {"output": "report.html"}
    assert f"compared with {path}" in (tmp_path / "report.html").read_text()


def test_a_broken_pipe_is_quiet(path):
    dcp_zarr.save({f"w{n}": torch.ones(1) for n in range(3000)}, path)
    program = f"from dcp_zarr.cli import main; import sys; sys.argv = ['x', 'ls', {path!r}]; main()"
    done = subprocess.run(
        f'{sys.executable} -c "{program}" | head -1',
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Checkpoint")
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["stats", "report -o x.html"])
def test_torch_is_not_imported(path, command):
    arguments = ["x", *command.split(), path]
    program = f"import sys; from dcp_zarr import cli; sys.argv = {arguments!r}\n"
    program += "try: cli.main()\nfinally: assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_ls_imports_nothing_that_it_can_do_without(path):
    unneeded = {"torch", "zarr", "numcodecs", "rich", "xarray"}
    program = f"""
import sys
from dcp_zarr import cli, cli_words
sys.argv = ["dcp-zarr", "ls", {path!r}]
try:
    cli.main()
finally:
    assert not {unneeded} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("command", ["ls", "show", "stats", "diff", "verify", "export", "report"])
def test_every_command_has_an_example(command):
    assert f"Example: dcp-zarr {command}" in " ".join(run(command, "--help").split())


def test_convert_writes_another_format_and_says_what_is_not_as_it_was(path):
    tied = torch.ones(3)
    torch.save({"a": tied, "b": tied, "by number": {0: torch.ones(2)}, "o": 1}, "x.pt")
    assert run("convert", "x.pt", "again.zarr") == (
        "3 tensors, 1 objects in again.zarr\n"
        "Shared bytes, and have their own now: a, b\n"
        "Keys that were no text are text now, in by number\n"
    )
    run("convert", "again.zarr", "out", "--to", "dcp", "--no-verify")
    assert run("diff", "x.pt", "out") == "All 3 tensors are equal, bit for bit.\n"
    listed = run("convert", "again.zarr", "y.safetensors", "--allow-loss")
    assert listed == "3 tensors, 0 objects in y.safetensors\nLeft out o: an object\n"
    found = json.loads(run("convert", path, "out.h5", "model", "--compression", "none", "--json"))
    assert (found["tensors"], found["format"], found["nbytes"]) == (2, "hdf5", 52)


def test_repack_keeps_a_part_in_place(path):
    assert run("repack", path, "--keep", "model.w", "--read-chunk-bytes", "1MiB") == (
        f"1 tensors, 0 objects in {path}\n"
    )
    assert list(dcp_zarr.load(path, flat=True)) == ["model.w"]


def test_a_compression_that_there_is_not_is_refused(path):
    done = CliRunner().invoke(cli.app, ["repack", str(path), "--compression", "huge"])
    message = "--compression huge: it is none of keep, none, fast and small."
    assert str(done.exception) == message
