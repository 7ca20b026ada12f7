"""What stock tools say of a checkpoint in one zip file, and what we say of a damaged one."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr

import dcp_zarr
from dcp_zarr import commit
from dcp_zarr.containers.zip_sink import decode_entries, encode_entries
from tests import ranks
from tests.ranks import parts
from tests.test_containers import mixed_state, save


class TestZip:
    """What stock tools say of the file."""

    @pytest.fixture(autouse=True)
    def saved(self):
        self.whole, states = mixed_state()
        save("x.zarr.zip", states, read_chunk_bytes=20_000)

    @pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
    def test_unzip_finds_no_errors(self):
        done = subprocess.run(["unzip", "-t", "x.zarr.zip"], capture_output=True, check=True)
        assert b"No errors detected" in done.stdout

    def test_zipfile_finds_no_errors(self):
        with zipfile.ZipFile("x.zarr.zip") as file:
            assert file.testzip() is None
            assert file.namelist()[-1] == "zarr.json"
            assert {entry.compress_type for entry in file.infolist()} == {zipfile.ZIP_STORED}

    def test_zarr_reads_it(self):
        store = zarr.storage.ZipStore("x.zarr.zip", mode="r")
        found = zarr.open_group(store, mode="r")["m/large"][...]
        store.close()
        np.testing.assert_array_equal(found, self.whole["m.large"].numpy())

    def test_tensorstore_reads_it(self):
        base = {"driver": "file", "path": str(Path("x.zarr.zip").resolve())}
        spec = {"driver": "zarr3", "kvstore": {"driver": "zip", "base": base, "path": "m/cut/"}}
        found = tensorstore.open(spec).result().read().result()
        np.testing.assert_array_equal(found, self.whole["m.cut"].numpy())

    def test_holes_are_at_most_eight_hundredths(self):
        with zipfile.ZipFile("x.zarr.zip") as file:
            payload = sum(e.file_size + 30 + len(e.filename) for e in file.infolist())
            end = file.start_dir
        assert end <= payload * 1.09

    def test_it_is_no_zip_file_before_it_is_whole(self):
        writer = dcp_zarr.ZarrStorageWriter("new.zarr.zip")
        planners, plans, metadata = ranks.plan([writer], [{"w": torch.ones(70)}])
        results = [writer.write_data(plans[0], planners[0]).wait()]
        assert not zipfile.is_zipfile(".new.zarr.zip.partial/store.zip")
        with pytest.raises(dcp_zarr.IncompleteCheckpointError, match="never finished"):
            dcp_zarr.open_checkpoint("new.zarr.zip")
        writer.finish(metadata, results)
        assert zipfile.is_zipfile("new.zarr.zip")

    def test_a_rank_whose_notes_cannot_be_read_is_named(self):
        states = [{"w": part} for part in parts(torch.ones(600, 50), (2, 1))]
        writers = [dcp_zarr.ZarrStorageWriter("x.zarr.zip") for _ in states]
        planners, plans, metadata = ranks.plan(writers, states)
        results = [
            w.write_data(plan, planner).wait()
            for w, plan, planner in zip(writers, plans, planners, strict=True)
        ]
        Path(".x.zarr.zip.partial/~_staging/1.entries").unlink()
        with pytest.raises(dcp_zarr.SaveError, match=r"Rank 1's files are not visible"):
            writers[0].finish(metadata, results)

    def test_an_unpacked_directory_may_keep_the_suffix(self):
        with zipfile.ZipFile("x.zarr.zip") as file:
            file.extractall("y.zip")
        assert torch.equal(dcp_zarr.load("y.zip", "m.cut")["m.cut"], self.whole["m.cut"])

    def test_entries_that_another_job_wrote_are_named(self):
        writer = dcp_zarr.ZarrStorageWriter("x.zarr.zip")
        planners, plans, metadata = ranks.plan([writer], [{"w": torch.ones(70)}])
        results = [writer.write_data(plans[0], planners[0]).wait()]
        notes = Path(".x.zarr.zip.partial/~_staging/0.entries")
        entries = decode_entries(notes.read_bytes())
        notes.write_bytes(encode_entries([*entries, replace(entries[0], name="z", start=99)]))
        with pytest.raises(
            dcp_zarr.SaveError, match=r"each object once \('z'\); the save is given"
        ):
            writer.finish(metadata, results)

    def test_a_last_sync_that_fails_where_files_have_no_second_names_leaves_one(self, monkeypatch):
        def fail(path, real=commit.sync_directory):
            if path == Path.cwd():
                raise OSError(5, "Input/output error")
            real(path)

        def no_link(*_):
            raise OSError(95, "Operation not supported")

        with monkeypatch.context() as patched:
            patched.setattr(commit, "sync_directory", fail)
            patched.setattr("os.link", no_link)
            with pytest.raises(dcp_zarr.SaveError, match="Input/output error"):
                dcp_zarr.save({"w": torch.ones(3)}, "x.zarr.zip")
        assert dcp_zarr.load("x.zarr.zip")["w"].tolist() == [1, 1, 1]

    def test_deflated_entries_are_refused_with_what_to_do(self):
        with zipfile.ZipFile("x.zarr.zip") as file:
            file.extractall("x")
        with zipfile.ZipFile("y.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for part in Path("x").rglob("*"):
                file.write(part, part.relative_to("x"))
        with pytest.raises(dcp_zarr.CorruptionError, match=r"in 'y.zip' is deflated; pack the"):
            dcp_zarr.load("y.zip", "m.cut")

    def test_whatever_is_wrong_with_the_central_directory_is_an_error_of_ours(self):
        original = Path("x.zarr.zip").read_bytes()
        start = len(original) - 1500
        for position in range(start, len(original)):
            for bit in (1, 32, 128):
                damaged = bytearray(original)
                damaged[position] ^= bit
                Path("y.zip").write_bytes(damaged)
                try:
                    with dcp_zarr.open_checkpoint("y.zip") as opened:
                        opened.verify()
                        assert opened["scalar"][...] == 2.5
                except dcp_zarr.DcpZarrError:
                    continue

    def test_verify_finds_every_flipped_byte(self):
        original = Path("x.zarr.zip").read_bytes()
        for position in range(0, len(original), len(original) // 150):
            if not any(original[max(position - 8, 0) : position + 8]):
                continue
            damaged = bytearray(original)
            damaged[position] ^= 4
            Path("y.zip").write_bytes(damaged)
            try:
                with dcp_zarr.open_checkpoint("y.zip") as opened:
                    assert opened.verify(), position
            except dcp_zarr.DcpZarrError:
                continue
