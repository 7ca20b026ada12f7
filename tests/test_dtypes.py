"""Every dtype and codec, bit for bit, read by us and by others."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import warnings

import numcodecs
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from torch.testing._internal.two_tensor import TwoTensor

import dcp_zarr
from dcp_zarr import tensors
from dcp_zarr.dtypes import EXTENSION_TYPES, PACKED, TABLE
from dcp_zarr.errors import OptionError, UnsupportedTensorError
from tests import processes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

# An older torch lacks the youngest dtypes.
DTYPES = [name for name in TABLE if hasattr(torch, name)]
READERS = ["dcp_zarr", "zarr", "tensorstore", "zarrs"]
TENSORSTORE_LACKS = {"complex32"}
ZARRS_FALLS_BACK = EXTENSION_TYPES
"""zarrs' Python package reads these through zarr's own pipeline."""


def every_pattern(name):
    """Return a tensor with all bit patterns of a dtype, or many; NaN payloads and -0.0 included."""
    dtype = TABLE[name]
    rng = np.random.default_rng(0)
    if name == "bool":
        return torch.from_numpy(rng.integers(0, 2, (64, 1024), np.uint8)).view(torch.bool)
    if dtype.itemsize <= 2:
        bits = np.arange(2 ** (8 * dtype.itemsize), dtype=dtype.bits).reshape(-1, 64)
    else:
        raw = rng.integers(0, 256, (512, 64, dtype.itemsize), np.uint8)
        raw[0] = 0
        raw[1, :, -1] = 0x80
        bits = raw.view(dtype.bits)[..., 0]
    return tensors.from_bits(bits, name)


def bits_of(array):
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8)


def read_with(reader, path):
    if reader == "dcp_zarr":
        return np.asarray(dcp_zarr.open_checkpoint(path)["w"])
    if reader == "tensorstore":
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/w"}}
        return tensorstore.open(spec).result().read().result()
    if reader == "zarr":
        return zarr.open_group(path, mode="r", zarr_format=3)["w"][...]
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return zarr.open_group(path, mode="r", zarr_format=3)["w"][...]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_of_a_dtype_survives(name, reader, tmp_path):
    if reader == "tensorstore" and name in TENSORSTORE_LACKS:
        reader = "zarr"
    if reader == "zarrs" and name in ZARRS_FALLS_BACK:
        reader = "zarr"
    source = every_pattern(name)
    # Several read chunks in one object, so that indexes and padding are in play.
    dcp_zarr.save({"w": source}, tmp_path / "x.zarr")
    found = read_with(reader, str(tmp_path / "x.zarr"))
    np.testing.assert_array_equal(bits_of(found), bits_of(tensors.bits(source)))


@pytest.mark.parametrize("name", DTYPES)
def test_torch_gets_its_dtype_back(name):
    source = every_pattern(name)
    dcp_zarr.save({"w": source}, "x.zarr")
    loaded = dcp_zarr.load("x.zarr")["w"]
    assert loaded.dtype == source.dtype
    np.testing.assert_array_equal(bits_of(tensors.bits(loaded)), bits_of(tensors.bits(source)))
    part = dcp_zarr.open_checkpoint("x.zarr")["w"][3:5, ::-2]
    assert part.dtype == source.dtype
    expected = tensors.bits(source)[3:5, ::-2]
    np.testing.assert_array_equal(bits_of(tensors.bits(part)), bits_of(expected))


CODECS = {
    "fast": "fast",
    "small": "small",
    "None": None,
    "blosc": numcodecs.Blosc("zlib", 3, numcodecs.Blosc.SHUFFLE),
    "blosc auto": numcodecs.Blosc("lz4hc", 5, numcodecs.Blosc.AUTOSHUFFLE, blocksize=4096),
    "blosc plain": numcodecs.Blosc("zstd", 1, numcodecs.Blosc.NOSHUFFLE),
    "zstd": numcodecs.Zstd(3),
    "zstd checksum": numcodecs.Zstd(1, checksum=True),
    "gzip": numcodecs.GZip(1),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_every_codec_is_read_by_others(codec, dtype, reader, tmp_path):
    source = (torch.randn(700, 1000) * 40).to(dtype)
    dcp_zarr.save({"w": source}, tmp_path / "x.zarr", compression=codec)
    found = read_with(reader, str(tmp_path / "x.zarr"))
    np.testing.assert_array_equal(bits_of(found), bits_of(tensors.bits(source)))


def test_compression_by_pattern_takes_the_first_that_matches():
    state = {"model": {"w": torch.zeros(300_000)}, "optim": {"m": torch.zeros(300_000)}}
    dcp_zarr.save(state, "x.zarr", compression={"optim": "small", "**.w": None})
    checkpoint = dcp_zarr.open_checkpoint("x.zarr")
    assert "stored with none" in repr(checkpoint["model.w"])
    assert "stored with zstd" in repr(checkpoint["optim.m"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("best", "compression='best' is not one of 'fast', 'small', None"),
        (numcodecs.LZ4(), r"compression=LZ4\(acceleration=1\) is not one of"),
        ({"w": numcodecs.Delta("f4")}, "for pattern 'w' is not one of"),
    ],
)
def test_other_codecs_are_refused_by_name(option, message):
    with pytest.raises(OptionError, match=message):
        dcp_zarr.ZarrStorageWriter("x.zarr", compression=option)


def test_the_bits_encoding_needs_no_extension_types(tmp_path):
    """A zarr that has never heard of us lists and reads the store."""
    source = every_pattern("bfloat16")
    state = {"w": source, "f8": every_pattern("float8_e4m3fn")}
    dcp_zarr.save(state, tmp_path / "x.zarr", dtype_encoding="bits")
    assert torch.equal(
        dcp_zarr.load(tmp_path / "x.zarr")["w"].view(torch.int16), source.view(torch.int16)
    )
    program = f"""
        import sys, importlib.metadata as metadata
        others = [e for d in metadata.distributions() for e in d.entry_points
                  if "dcp_zarr" not in e.value]
        metadata.entry_points = lambda **k: metadata.EntryPoints(others).select(**k)
        sys.modules["dcp_zarr"] = None
        import zarr
        group = zarr.open_group({str(tmp_path / "x.zarr")!r}, mode="r")
        print({{name: str(array.dtype) for name, array in group.members()}})
        print(int(group["w"][...].sum(dtype="u8")))
    """
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(program)], text=True)
    listed, total = out.splitlines()
    assert ast.literal_eval(listed) == {"f8": "uint8", "w": "uint16"}
    assert int(total) == sum(range(65536))


def test_a_fresh_zarr_reads_bfloat16_because_the_package_is_installed(tmp_path):
    dcp_zarr.save({"w": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "x.zarr")
    program = f"import zarr; print(zarr.open_group({str(tmp_path / 'x.zarr')!r})['w'][...])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[1 1 1]\n"


@pytest.mark.parametrize("name", [name for name in PACKED if name in DTYPES])
def test_packed_types_are_stored_as_their_bytes(name, tmp_path):
    source = every_pattern(name)
    dcp_zarr.save({"w": source}, tmp_path / "x.zarr")
    array = zarr.open_array(tmp_path / "x.zarr/w", mode="r", zarr_format=3)
    assert array.dtype == np.uint8
    assert array.attrs["dcp_zarr"]["torch_dtype"] == name


class Opaque(torch.Tensor):
    """Wraps a tensor, and does not say how."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        found = function(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))
        return cls(found) if isinstance(found, torch.Tensor) else found


def two_tensor():
    return TwoTensor(torch.ones(3), torch.zeros(3))


UNSUPPORTED = {
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        "'w' has layout torch.sparse_coo; use to_dense",
    ),
    "sparse rows": (
        lambda: torch.eye(3).to_sparse_csr(),
        "'w' has layout torch.sparse_csr; use to_dense",
    ),
    "meta": (
        lambda: torch.zeros(3, device="meta"),
        "'w' is on the meta device and has no values",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "'w' has dtype torch.qint8, which dcp_zarr cannot store; convert",
    ),
    "wrapper": (
        two_tensor,
        "'w' has type TwoTensor, whose values are not its own; store the tensors that it wraps, or",
    ),
    "wrapper as a parameter": (
        lambda: torch.nn.Parameter(two_tensor()),
        "'w' has type TwoTensor, whose values are not its own",
    ),
    "opaque wrapper": (
        lambda: Opaque(torch.ones(3)),
        "'w' has type Opaque, whose values are not its own",
    ),
}


@pytest.mark.parametrize(("make", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_cannot_be_stored_are_named(make, message):
    with pytest.raises(UnsupportedTensorError, match=message):
        dcp_zarr.save({"w": make()}, "x.zarr")
    with pytest.raises((dcp_zarr.CheckpointNotFoundError, dcp_zarr.IncompleteCheckpointError)):
        dcp_zarr.open_checkpoint("x.zarr")


def save_what_one_rank_cannot_store(rank, count, broken):
    warnings.simplefilter("ignore")
    for make, message in UNSUPPORTED.values():
        state = {"v": torch.ones(2)} | ({"w": make()} if rank == broken else {})
        with pytest.raises(UnsupportedTensorError, match=message):
            dcp_zarr.save(state, "x.zarr")


@pytest.mark.dist
@pytest.mark.parametrize("broken", [0, 1])
def test_tensors_that_one_rank_cannot_store_are_named_on_all(tmp_path, broken):
    processes.run(2, tmp_path, save_what_one_rank_cannot_store, broken)
    assert not (tmp_path / "x.zarr").exists()


def test_a_tensor_whose_storage_was_freed_is_named():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensorError, match="'w' has no storage any more"):
        tensors.stored_dtype(freed, "w")
