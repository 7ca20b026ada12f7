"""What dead saves left is removed; what lives, or is not ours, is not."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dcp_zarr
from dcp_zarr import CheckpointNotFoundError, claims, cli
from dcp_zarr.cleaning import clean
from tests.test_run_folder import begin_save, save


def states(**options):
    return {Path(row.path).name: row.state for row in clean("runs", **options)}


def die(path):
    """Have another process die in a save, when all is written but the commit."""
    pid = os.fork()
    if pid == 0:
        begin_save(path)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_what_a_dead_save_left_goes_and_all_else_stays(path):
    save(1, f"runs/{path}")
    die(f"runs/{path}")
    Path(f"runs/.{path}.partial").rename("aside")
    die(f"runs/{path}")
    Path("aside").rename(f"runs/.{path}.stale-0123abcd")
    Path("runs/.other.partial").mkdir()
    Path("runs/.other.partial/mine").write_text("mine")
    Path("runs/.file.partial").write_text("mine")
    left = {f".{path}.partial": "left over", f".{path}.stale-0123abcd": "left over"}
    other = {".other.partial": "kept: dcp_zarr made nothing of the kind"}
    assert states(idle_s=0) == left | other
    assert len(os.listdir("runs")) == 5
    assert states(idle_s=0, delete=True) == dict.fromkeys(left, "removed") | other
    assert {*os.listdir("runs")} == {path, ".other.partial", ".file.partial"}
    assert dcp_zarr.load(f"runs/{path}")["w"].tolist() == [1, 1]


def test_a_save_that_lives_is_known_by_its_claim_whatever_its_age(path):
    writer = begin_save(f"runs/{path}")
    assert states(idle_s=0, delete=True) == {f".{path}.partial": "kept: a save holds it"}
    del writer
    gc.collect()
    assert states(idle_s=0, delete=True) == {f".{path}.partial": "removed"}


def test_a_save_that_was_written_to_not_long_ago_is_kept(path):
    die(f"runs/{path}")
    why = "kept: it was changed less than 24 h ago; see --idle-hours"
    kept = {f".{path}.partial": why}
    assert states(delete=True) == kept
    for file in Path("runs").rglob("*"):
        os.utime(file, (0, 0))  # sets what cannot be set back: when that was done
    assert states(delete=True) == kept


def test_a_save_beside_a_clean_is_not_harmed(path):
    for _ in range(3):
        die(f"runs/{path}")
        writer = dcp_zarr.storage_writer(f"runs/{path}")
        real = writer.write_data

        def write_data(*given, real=real):
            clean("runs", delete=True, idle_s=0)
            return real(*given)

        writer.write_data = write_data
        torch.distributed.checkpoint.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
        assert dcp_zarr.load(f"runs/{path}")["w"].tolist() == [1, 1]
        assert os.listdir("runs") == [path]


def test_a_checkpoint_half_way_through_a_swap_is_kept_until_the_other_is_there():
    save(3, "runs/x.zarr")
    Path("runs/x.zarr").rename("runs/.x.zarr.old")
    found = states(idle_s=0, delete=True)
    assert found == {".x.zarr.old": "kept: it is the checkpoint itself, half-way through a swap"}
    os.mkdir("runs/x.zarr")
    assert states(idle_s=0, delete=True) == {".x.zarr.old": "removed"}


def test_the_rest_of_a_checkpoint_whose_removal_broke_off_goes_but_no_other_files():
    for name in (".y.zarr.commit", ".x.zarr.commit"):
        save(3, "runs/x.zarr")
        Path("runs/x.zarr").rename(f"runs/{name}")
        Path("runs", name, "zarr.json").unlink()
    Path("runs/.y.zarr.commit/w/mine.txt").write_text("mine")
    assert states(idle_s=0, delete=True) == {
        ".x.zarr.commit": "removed",
        ".y.zarr.commit": "kept: dcp_zarr made nothing of the kind",
    }


def test_links_are_not_followed():
    save(1, "elsewhere.zarr")
    os.mkdir("runs")
    Path("runs/.x.zarr.old").symlink_to("../elsewhere.zarr")
    Path("runs/x.zarr").symlink_to("../elsewhere.zarr")
    die("runs/y.zarr")
    Path("runs/.y.zarr.partial/inside").symlink_to("../../elsewhere.zarr")
    assert states(idle_s=0, delete=True) == {".y.zarr.partial": "removed"}
    assert dcp_zarr.load("elsewhere.zarr")["w"].tolist() == [1, 1]


def test_what_cannot_be_removed_is_said(path, monkeypatch):
    die(f"runs/{path}")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dcp_zarr.cleaning.shutil.rmtree", refuse)
    (state,) = states(idle_s=0, delete=True).values()
    assert state == "kept: [Errno 13] Permission denied"


def test_from_a_shell_nothing_goes_unless_told():
    die("runs/x.zarr")

    def run(*arguments):
        done = CliRunner().invoke(cli.app, ["clean", "runs", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert "changed less than 24 h ago; see --idle-hours" in run("--delete")
    assert "left over\n" in run("--idle-hours", "0")
    (row,) = json.loads(run("--idle-hours", "0", "--delete", "--json"))
    assert (row["path"], row["state"]) == ("runs/.x.zarr.partial", "removed")
    assert row["nbytes"] > 0
    assert os.listdir("runs") == []


def test_a_directory_that_is_not_there_is_said_to_be_so():
    with pytest.raises(CheckpointNotFoundError, match="There is no directory 'nowhere'"):
        clean("nowhere")


def test_a_claim_ends_with_its_process_and_is_not_copied():
    import copy

    claim = claims.Claim("mark")
    assert claims.is_held("mark")
    copy.copy(claim).release()
    assert claims.is_held("mark")
    claim.release()
    assert not claims.is_held("mark")
    assert not claims.is_held("nothing")


def test_a_claim_that_may_not_be_looked_at_is_taken_for_held(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(claims.os, "open", refuse)
    assert claims.is_held("mark")


def test_what_a_swap_replaced_goes_only_when_the_swap_is_durable(monkeypatch):
    die("runs/x.zarr")
    seen = []
    monkeypatch.setattr(
        "dcp_zarr.cleaning.sync_directory", lambda _: seen.append(os.listdir("runs"))
    )
    clean("runs", delete=True, idle_s=0)
    assert seen == [[".x.zarr.partial"]]


def test_a_file_system_without_locks_has_no_claims_that_hold(monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    claim = claims.Claim("mark")
    assert not claims.is_held("mark")
    claim.release()
