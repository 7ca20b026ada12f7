"""What stock HDF5 readers say of a checkpoint in one file, and how that file is made."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import hdf5plugin
import ml_dtypes
import numcodecs
import numpy as np
import pytest
import torch
import xarray
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

import dcp_zarr
from dcp_zarr import tensors
from dcp_zarr.containers import hdf5_format, hdf5_target
from tests import ranks
from tests.ranks import parts
from tests.test_containers import assert_equal, mixed_state, save

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

PATTERNS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


def load(path="x.h5"):
    return dcp_zarr.load(path, flat=True, weights_only=False)


class TestTypes:
    """What h5py, which knows nothing of torch, makes of each dtype."""

    def test_every_bfloat16_pattern_is_the_number_it_was(self):
        dcp_zarr.save({"w": PATTERNS.view(torch.bfloat16)}, "x.h5")
        with h5py.File("x.h5") as file:
            found = file["w"][:]
        expected = PATTERNS.view(torch.bfloat16).float().numpy()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)  # NaN equals NaN here
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))

    def test_every_float8_e5m2_pattern_is_the_number_it_was(self):
        bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        dcp_zarr.save({"w": bits.view(torch.float8_e5m2)}, "x.h5")
        with h5py.File("x.h5") as file:
            found = file["w"][:]
        np.testing.assert_array_equal(
            found.astype(np.float32), bits.numpy().view(ml_dtypes.float8_e5m2).astype(np.float32)
        )

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            (torch.tensor([True, False]), np.dtype(bool)),
            (torch.tensor([1 + 2j]), np.dtype("c8")),
            (torch.tensor([1 + 2j], dtype=torch.complex128), np.dtype("c16")),
            (torch.tensor([1.5]).to(torch.float8_e4m3fn), np.dtype("u1")),
            (torch.tensor([1.5], dtype=torch.float16), np.dtype("f2")),
            (torch.tensor([7], dtype=torch.uint16), np.dtype("u2")),
            (torch.tensor(7), np.dtype("i8")),
            (torch.tensor(2.5, dtype=torch.float64), np.dtype("f8")),
        ],
        ids=str,
    )
    def test_a_value_has_the_dtype_of_its_kind(self, value, dtype):
        dcp_zarr.save({"w": value}, "x.h5")
        with h5py.File("x.h5") as file:
            assert file["w"].dtype == dtype
            assert file["w"].shape == tuple(value.shape)
            if value.dtype != torch.float8_e4m3fn:
                np.testing.assert_array_equal(file["w"][()], value.numpy())

    def test_complex32_is_pairs_of_float16(self):
        dcp_zarr.save({"w": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex32)}, "x.h5")
        with h5py.File("x.h5") as file:
            assert file["w"][:].tolist() == [(1, 2), (3, -4)]

    def test_bits_are_unsigned_integers(self):
        dcp_zarr.save({"w": PATTERNS.view(torch.bfloat16)}, "x.h5", dtype_encoding="bits")
        with h5py.File("x.h5") as file:
            np.testing.assert_array_equal(file["w"][:], PATTERNS.numpy())
        assert dcp_zarr.load("x.h5")["w"].dtype == torch.bfloat16

    def test_the_attribute_tells_name_and_dtype(self):
        dcp_zarr.save({"a/b": torch.zeros(3, dtype=torch.bfloat16)}, "x.h5")
        with h5py.File("x.h5") as file:
            described = file["a~2fb"].attrs["dcp_zarr"]
        assert '"fqn":"a/b","torch_dtype":"bfloat16"' in described.decode()


class TestFilters:
    """Every codec is read back by h5py."""

    def check(self, compression):
        whole, states = mixed_state()
        save("x.h5", states, compression=compression, read_chunk_bytes=20_000)
        with h5py.File("x.h5") as file:
            for fqn in ("m.large", "m.cut", "m.bias"):
                np.testing.assert_array_equal(file[fqn.replace(".", "/")][:], whole[fqn].numpy())
            return file["m/large"]._filters

    def test_the_default_needs_no_plugin(self):
        assert list(self.check("small")) == ["shuffle", "gzip"]

    @pytest.mark.parametrize("level", [1, 6])
    def test_gzip_is_the_filter_of_that_name(self, level):
        assert self.check(numcodecs.GZip(level)) == {"gzip": level}

    @pytest.mark.parametrize(
        ("compression", "plugin"),
        [
            ("fast", hdf5plugin.Blosc),
            (numcodecs.Blosc("zstd", 3), hdf5plugin.Blosc),
            (numcodecs.Blosc("blosclz", 5, numcodecs.Blosc.NOSHUFFLE), hdf5plugin.Blosc),
            (numcodecs.Zstd(3), hdf5plugin.Zstd),
        ],
        ids=str,
    )
    def test_hdf5plugin_decodes_the_others(self, compression, plugin):
        assert list(self.check(compression)) == [str(plugin.filter_id)]

    def test_none_compresses_nothing(self):
        self.check(None)
        with h5py.File("x.h5") as file:
            large = file["m/large"]
            raw = large.id.read_direct_chunk((0, 0))
            assert raw[0] == 1  # all filters were skipped
            rows = large.chunks[0]
            assert raw[1] == large[:rows].tobytes()

    def test_what_cannot_be_compressed_is_stored_as_it_is(self):
        noise = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
        floats = noise[:240_000].view(torch.float32).clone()
        dcp_zarr.save({"bytes": noise, "floats": floats}, "x.h5")
        with h5py.File("x.h5") as file:
            assert file["bytes"].id.get_chunk_info(0).filter_mask == 0b1
            assert file["floats"].id.get_chunk_info(0).filter_mask == 0b11
            assert file["bytes"].id.get_storage_size() == noise.numel()
            np.testing.assert_array_equal(file["bytes"][:], noise.numpy())
        np.testing.assert_array_equal(tensors.bits(load()["floats"]), tensors.bits(floats))

    def test_read_chunks_are_a_mebibyte_at_most(self):
        big = torch.zeros(3, 700_001)
        save("x.h5", [{"w": part} for part in parts(big, (3, 1))] + [{"v": torch.zeros(5000, 777)}])
        with h5py.File("x.h5") as file:
            for found in (file["w"], file["v"]):
                assert np.prod(found.chunks) * 4 <= 1 << 20


def tool(*command):
    """Run one of HDF5's own tools; return what it prints."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class TestTools:
    """HDF5 1.10's own tools, and xarray."""

    @pytest.fixture(autouse=True)
    def saved(self):
        self.whole, states = mixed_state()
        self.whole["half"] = torch.tensor([1.5, -2], dtype=torch.bfloat16)
        states[0]["half"] = self.whole["half"]
        save("x.h5", states, read_chunk_bytes=20_000)

    def test_h5ls_lists_every_tensor(self):
        listed = tool("h5ls", "-r", "x.h5")
        assert "/m/large                 Dataset {3000, 50}" in listed
        assert "/scalar                  Dataset {SCALAR}" in listed

    def test_h5dump_prints_bfloat16_as_numbers(self):
        assert "(0): 1.5, -2" in tool("h5dump", "-d", "/half", "x.h5")

    def test_h5dump_reads_all_of_it(self):
        assert "error" not in tool("h5dump", "x.h5").lower()

    def test_h5stat_accounts_for_the_file(self):
        assert "# of unique datasets: 9" in tool("h5stat", "x.h5")

    def test_a_repacked_file_has_the_same_values(self):
        tool("h5repack", "x.h5", "y.h5")
        tool("h5diff", "x.h5", "y.h5")
        with pytest.warns(UserWarning, match="written anew by another program, such as h5repack"):
            assert_equal(load("y.h5"), self.whole)
        with pytest.warns(UserWarning, match="written anew"):
            opened = dcp_zarr.open_checkpoint("y.h5")
        with opened:
            np.testing.assert_array_equal(
                np.asarray(opened["m.large"][7:9, 3:5]), self.whole["m.large"][7:9, 3:5].numpy()
            )
            (damage,) = opened.verify()
        assert "written anew by another program" in str(damage)

    def test_a_repacked_file_without_compression_is_read_too(self):
        tool("h5repack", "-f", "NONE", "-l", "CONTI", "x.h5", "y.h5")
        with pytest.warns(UserWarning, match="written anew"):
            assert_equal(load("y.h5"), self.whole)

    def test_xarray_opens_it_as_a_tree(self):
        with xarray.open_datatree("x.h5", engine="h5netcdf", phony_dims="access") as tree:
            np.testing.assert_array_equal(tree["m/cut"].values, self.whole["m.cut"].numpy())
            assert tree["half"].values.tolist() == [1.5, -2]


class TestLayout:
    """Where things lie in the file."""

    def test_names_attributes_and_objects_may_be_long(self):
        starts = list(range(0, 30_000, 3))
        cut = [ranks.Part(torch.arange(30_000), ranks.Region((s,), (3,))) for s in starts]
        cut[0], cut[1] = (
            ranks.Part(cut[0].whole, ranks.Region((0,), (2,))),
            ranks.Part(cut[0].whole, ranks.Region((2,), (4,))),
        )
        names = {f"{'n' * 3000}.{number}": torch.tensor([number]) for number in range(20)}
        state = {"w": cut, "text": "t" * 100_000, "list": [(1, 2)] * 90_000, **names}
        save("x.h5", [state])
        found = load()
        assert torch.equal(found["w"], torch.arange(30_000))
        assert (found["text"], found["list"]) == (state["text"], state["list"])
        assert all(torch.equal(found[name], value) for name, value in names.items())
        with h5py.File("x.h5") as file:
            assert len(file["~_schema"][()]) > 256 << 10
            assert '"tiling"' not in file["w"].attrs["dcp_zarr"].decode()
        tool("h5repack", "x.h5", "y.h5")
        tool("h5diff", "x.h5", "y.h5")

    def test_names_may_be_prefixes_of_others(self):
        state = {"w": torch.ones(1), "w.scale": torch.ones(2), "w.scale.x": torch.ones(3)}
        dcp_zarr.save(state, "x.h5")
        assert_equal(load(), state)

    def test_values_move_no_address(self):
        def addresses(step, path):
            state = {"w": torch.full((900, 900), float(step)), "s": torch.tensor(step)}
            state |= {"step": 10**step, "text": "x" * step * 1000, "o": (step,) * step}
            dcp_zarr.save(state, path, compression=None, thread_count=1)
            with h5py.File(path) as file:
                offsets = []
                file["w"].id.chunk_iter(lambda chunk: offsets.append(chunk.byte_offset))
                return offsets, file["s"].id.get_offset()

        assert addresses(1, "1.h5") == addresses(9, "9.h5")

    @pytest.mark.parametrize("compression", ["small", None, "fast"])
    @pytest.mark.parametrize("count", [1, 4, 16])
    def test_holes_are_at_most_eight_hundredths(self, compression, count):
        torch.manual_seed(0)
        whole = {f"w{n}": torch.randn(1600, 500) for n in range(4)}
        whole |= {"zeros": torch.zeros(1600, 1500), "odd": torch.randn(1999, 99)}
        cut = {fqn: parts(value, (count, 1)) for fqn, value in whole.items()}
        states = [{fqn: of[rank] for fqn, of in cut.items()} for rank in range(count)]
        save("x.h5", states, compression=compression)
        with dcp_zarr.open_checkpoint("x.h5") as opened:
            payload = opened.stored_nbytes
        found = os.stat("x.h5")
        assert found.st_size <= 1.08 * payload + 40_000
        assert found.st_blocks * 512 <= 1.01 * payload + 80_000

    @pytest.mark.parametrize("single", [torch.tensor([True]), torch.tensor(True), torch.zeros(7)])
    def test_a_read_chunk_may_be_one_byte(self, single, caplog):
        state = {f"w{n}": torch.randn(400, 300) for n in range(3)} | {"one": single}
        with caplog.at_level(logging.WARNING):
            dcp_zarr.save(state, "x.h5", read_chunk_bytes=20_000)
        assert not caplog.records
        assert_equal(load(), state)

    @pytest.mark.parametrize("compression", ["small", None, "fast"])
    def test_many_read_chunks_may_be_one_byte(self, compression, caplog):
        state = {"w": torch.arange(5, dtype=torch.uint8), "v": torch.randn(400, 300)}
        dcp_zarr.save(state, "x.h5", read_chunk_bytes=1, compression=compression)
        assert ("is copied instead" in caplog.text) == (compression != "fast")
        assert_equal(load(), state)
        assert dcp_zarr.open_checkpoint("x.h5").verify() == []
        with h5py.File("x.h5") as file:
            assert file["w"][:].tolist() == [0, 1, 2, 3, 4]

    def test_cached_plans_leave_room_for_metadata(self, caplog):
        planner, writer = DefaultSavePlanner(enable_plan_caching=True), dcp_zarr.HDF5StorageWriter()
        for step in range(3):
            state = {f"w{n}": torch.full((1 << 18,), float(step)) for n in range(16)}
            options = {"storage_writer": writer, "planner": planner, "no_dist": True}
            torch.distributed.checkpoint.save(state, checkpoint_id=f"{step}.h5", **options)
            assert_equal(load(f"{step}.h5"), state)
        assert "copied" not in caplog.text

    @pytest.mark.parametrize(
        "state", [{}, {"o": 1}, {"o": (1,)}, {"w": torch.zeros(0, 3), "o": (1,)}]
    )
    def test_a_file_without_read_chunks_is_made_like_any_other(self, state, caplog):
        dcp_zarr.save(state, "x.h5")
        assert "copied" not in caplog.text
        assert_equal(load(), state)
        assert dcp_zarr.open_checkpoint("x.h5").verify() == []

    def test_the_file_is_no_hdf5_file_before_the_end(self):
        _, states = mixed_state()
        writers = [dcp_zarr.HDF5StorageWriter("x.h5") for _ in states]
        planners, plans, metadata = ranks.plan(writers, states)
        results = [
            writer.write_data(plan, planner).wait()
            for writer, plan, planner in zip(writers, plans, planners, strict=True)
        ]
        assert not h5py.is_hdf5(".x.h5.partial/store")
        assert os.listdir() == [".x.h5.partial"]
        writers[0].finish(metadata, results)
        assert os.listdir() == ["x.h5"]


def test_a_file_that_h5py_has_open_is_read_and_replaced():
    dcp_zarr.save({"w": torch.ones(3)}, "x.h5")
    for mode in ("r", "r+"):
        with h5py.File("x.h5", mode) as file:
            assert load()["w"].tolist() == [1, 1, 1]
            dcp_zarr.save({"w": torch.ones(3)}, "x.h5")
            assert file["w"][:].tolist() == [1, 1, 1]


class TestRewritten:
    """A file that h5py wrote anew, with other data sets than those that were saved."""

    @pytest.mark.parametrize(
        "other",
        [
            np.full(20_000, 1e300),
            np.zeros(20_000, "i4"),
            np.zeros(20_000, "S400"),
            np.zeros(5, "f4"),
        ],
        ids=["f8", "i4", "S400", "f4 of another shape"],
    )
    def test_another_type_or_shape_is_refused(self, other):
        dcp_zarr.save({"w": torch.arange(20_000.0)}, "x.h5")
        with h5py.File("x.h5") as file, h5py.File("y.h5", "w") as copy:
            hdf5_format.set_attribute(copy.id, hdf5_format.attribute(file.id))
            for name in ("~_schema", "~_read_chunks"):
                file.copy(name, copy)
            copy["w"] = other
        with pytest.warns(UserWarning, match="written anew"):
            opened = dcp_zarr.open_checkpoint("y.h5")
        with pytest.raises(dcp_zarr.CorruptionError, match="'w' has another shape or type"):
            np.asarray(opened["w"])
        assert "Data set 'w' was changed after the save" in "\n".join(map(str, opened.verify()))

    def test_a_filter_that_is_not_there_is_named(self):
        dcp_zarr.save({"w": torch.arange(200_000.0)}, "x.h5", compression="fast")
        tool("h5repack", "x.h5", "y.h5")
        program = "import dcp_zarr; dcp_zarr.load('y.h5')"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "import hdf5plugin first" in done.stderr

    def test_a_table_of_any_size_is_refused(self):
        dcp_zarr.save({"w": torch.arange(200.0)}, "x.h5")
        with h5py.File("x.h5", "r+") as file:
            del file["~_read_chunks"]
            made = file.create_dataset("~_read_chunks", (2**36, 3), "u8", chunks=(1024, 3))
            hdf5_format.set_attribute(made.id, b'{"sha256":"0","offset":0}')
        with pytest.raises(dcp_zarr.CorruptionError, match="table of read chunks"):
            load()

    def test_a_damaged_list_of_links_is_found(self):
        dcp_zarr.save({f"w{n}": torch.ones(2) for n in range(12)}, "x.h5")
        content = bytearray(Path("x.h5").read_bytes())
        content[content.index(b"FSHD") + 10] ^= 1
        Path("x.h5").write_bytes(content)
        with dcp_zarr.open_checkpoint("x.h5") as opened:
            assert "cannot be listed" in "\n".join(map(str, opened.verify()))

    def test_a_text_of_another_kind_is_refused(self):
        dcp_zarr.save({"w": torch.ones(2)}, "x.h5")
        with h5py.File("x.h5", "r+") as file:
            text = file["~_schema"][()]
            del file["~_schema"]
            file["~_schema"] = np.frombuffer(text, np.uint8)
        with pytest.raises(dcp_zarr.CorruptionError, match="~_schema is not one text"):
            load()


class TestCopied:
    """The other way to make the file, where libhdf5 wants read chunks elsewhere."""

    @pytest.fixture(autouse=True)
    def no_room(self, monkeypatch):
        monkeypatch.setattr(hdf5_target.hdf5_format, "metadata_nbytes", lambda *_: 0)

    @pytest.mark.parametrize("compression", ["small", None])
    def test_the_file_is_as_good_and_a_warning_says_so(self, compression, caplog):
        whole, states = mixed_state()
        save("x.h5", states, compression=compression, read_chunk_bytes=20_000)
        assert "libhdf5 needs" in caplog.text
        assert "Its data is copied instead." in caplog.text
        assert_equal(load(), whole)
        assert dcp_zarr.open_checkpoint("x.h5").verify() == []
        with h5py.File("x.h5") as file:
            np.testing.assert_array_equal(file["m/large"][:], whole["m.large"].numpy())
        assert os.listdir() == ["x.h5"]


class TestRefused:
    """What cannot be saved or read, and what is said of it."""

    def test_more_axes_than_hdf5_knows(self):
        with pytest.raises(dcp_zarr.UnsupportedTensorError, match="'w' has 33 axes, and HDF5"):
            dcp_zarr.save({"w": torch.zeros((1,) * 33)}, "x.h5")

    def test_a_zarr_writer_for_an_hdf5_path(self):
        with pytest.raises(CheckpointException, match="Use HDF5StorageWriter"):
            torch.distributed.checkpoint.save(
                {}, storage_writer=dcp_zarr.ZarrStorageWriter("x.h5"), no_dist=True
            )

    def test_an_hdf5_file_of_somebody_else(self):
        with h5py.File("x.h5", "w") as file:
            file["w"] = [1.0]
        with pytest.raises(dcp_zarr.FormatError, match="not a dcp_zarr checkpoint: its root has"):
            dcp_zarr.open_checkpoint("x.h5")
        with pytest.raises(dcp_zarr.CheckpointExistsError):
            dcp_zarr.save({}, "x.h5")

    def test_a_checkpoint_in_another_container(self):
        dcp_zarr.save({"w": torch.ones(3)}, "x.zarr.zip")
        Path("x.zarr.zip").rename("x.h5")
        with pytest.raises(dcp_zarr.CheckpointExistsError, match="checkpoint in an HDF5 file"):
            dcp_zarr.save({}, "x.h5")
        assert dcp_zarr.load("x.h5")["w"].tolist() == [1, 1, 1]

    def test_an_option_of_zarr_stores(self):
        with pytest.raises(dcp_zarr.OptionError, match="write_chunk_bytes is for Zarr stores"):
            dcp_zarr.save({}, "x.h5", write_chunk_bytes=5)

    def test_what_is_no_hdf5_file_at_all(self):
        Path("x.h5").write_bytes(b"nothing")
        with pytest.raises(dcp_zarr.CorruptionError, match="'x.h5' is not a whole HDF5 file"):
            dcp_zarr.open_checkpoint("x.h5")

    def test_a_file_without_the_suffix_is_known_by_its_first_bytes(self):
        writer = dcp_zarr.HDF5StorageWriter("checkpoint")
        torch.distributed.checkpoint.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
        assert h5py.is_hdf5("checkpoint")
        assert dcp_zarr.load("checkpoint")["w"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize("change", ["lost", "twice", "overlap"])
    def test_what_is_not_each_read_chunk_once(self, change, monkeypatch):
        real = hdf5_target.placed.decode

        def changed(*arguments):
            paths, rows = real(*arguments)
            rows = rows.copy()
            if change == "lost":
                rows = rows[1:]
            elif change == "twice":
                rows[1, 1] = rows[0, 1]
            else:
                rows[1, 2] = rows[0, 2] + 1
            return paths, rows

        monkeypatch.setattr(hdf5_target.placed, "decode", changed)
        with pytest.raises(dcp_zarr.SaveError, match="not each read chunk once; the save is giv"):
            dcp_zarr.save({"w": torch.zeros(1000, 100)}, "x.h5", read_chunk_bytes=20_000)
        assert os.listdir() == [".x.h5.partial"]

    def test_a_table_that_was_changed(self):
        dcp_zarr.save({"w": torch.ones(5000)}, "x.h5")
        with h5py.File("x.h5", "r+") as file:
            file["~_read_chunks"][0, 2] = 5
        with pytest.raises(dcp_zarr.CorruptionError, match="table of read chunks in 'x.h5' was"):
            load()

    def test_a_data_set_that_was_changed_is_found(self):
        dcp_zarr.save({"w": torch.ones(5000), "v": torch.ones(3)}, "x.h5")
        with h5py.File("x.h5", "r+") as file:
            del file["w"]
            file["v"].attrs["dcp_zarr"] = "x"
        with dcp_zarr.open_checkpoint("x.h5") as opened:
            found = "\n".join(map(str, opened.verify()))
        assert "Data set 'w'" in found
        assert "Data set 'v' was changed after the save" in found


@pytest.mark.parametrize("compression", ["small", "fast", None, numcodecs.GZip(1)], ids=str)
def test_a_reader_written_from_the_document_finds_the_values(compression):
    whole, states = mixed_state()
    save("x.h5", states, compression=compression, read_chunk_bytes=20_000)
    reader = Path(__file__).parent / "hdf5_reader_from_format.py"
    blocked = "; ".join(f"sys.modules[{n!r}] = None" for n in ("torch", "zarr", "dcp_zarr"))
    program = f"import sys, runpy; {blocked}; sys.argv[1:] = ['x.h5', 'm.large', '<f4']; "
    program += f"runpy.run_path({str(reader)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == whole["m.large"].tolist()


def entry_of(fqn):
    """Return what a save of one tensor plans for it."""
    dcp_zarr.save({fqn: torch.zeros(5000, 20)}, "one.h5", read_chunk_bytes=20_000)
    with dcp_zarr.open_checkpoint("one.h5") as opened:
        return opened._source.schema.tensors[fqn]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("name", ["w{}", "m.{}.w", "m.{}.a.b.w", "{}" + "x" * 190])
def test_room_for_metadata_is_enough_and_not_much_more(count, name):
    base = entry_of("w")
    fqns = [name.format(number) for number in range(count)]
    paths = hdf5_format.names.assign_paths(fqns)
    entries = [replace(base, array=replace(base.array, fqn=fqn, path=paths[fqn])) for fqn in fqns]
    room = hdf5_format.metadata_nbytes(entries, 1)
    needed = metadata_needed(entries)
    assert needed <= room <= 2 * needed + 4096


def metadata_needed(entries):
    from dcp_zarr.containers.hdf5_build import Build, SparseFile

    build = Build(hdf5_format.new_file(SparseFile(1 << 50, 1 << 50)), in_place=True)
    for entry in entries:
        build.add_tensor(entry, hdf5_format.description(entry))
    build.add_gaps(2, single_bytes=False)
    h5py.h5f.flush(build.file)
    needed = build.file.get_filesize()
    build.close()
    return needed


@pytest.mark.slow
def test_a_hundred_thousand_read_chunks_take_little_time_and_memory(monkeypatch):
    spent = {}
    real = dcp_zarr.HDF5StorageWriter.finish

    def finish(*arguments, **named):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before, started = peak_nbytes(), time.process_time()
        real(*arguments, **named)
        spent.update(seconds=time.process_time() - started, nbytes=peak_nbytes() - before)

    monkeypatch.setattr(dcp_zarr.HDF5StorageWriter, "finish", finish)
    state = {f"l.{n // 10}.w{n % 10}": torch.randn(12_800) for n in range(2000)}
    dcp_zarr.save(state, "x.h5", read_chunk_bytes=1024)
    assert spent["seconds"] < 5
    assert spent["nbytes"] < 500e6
    with h5py.File("x.h5") as file:
        assert file["l/7/w3"].id.get_num_chunks() == 50
        np.testing.assert_array_equal(file["l/7/w3"][:], state["l.7.w3"].numpy())
    with dcp_zarr.open_checkpoint("x.h5") as opened:
        assert opened.verify() == []


def peak_nbytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
