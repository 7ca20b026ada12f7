"""Frames that we build ourselves are read by every Blosc."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
import zarrs  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from dcp_zarr import split_frames
from dcp_zarr.codecs import CompressionRules

LEVEL_1 = numcodecs.Blosc("zstd", 1, numcodecs.Blosc.SHUFFLE, blocksize=1 << 20)
WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


def random(nbytes, itemsize):
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).view(WORDS[itemsize])


def weights(nbytes, itemsize):
    """Return numbers whose high bytes are those of normally distributed ones."""
    values = np.random.default_rng(0).standard_normal(nbytes // itemsize).astype(np.float32)
    kinds = {1: np.float16, 2: bfloat16, 4: np.float32, 8: np.float64, 16: np.complex128}
    cast = values.astype(kinds[itemsize])
    return cast.view(np.uint8)[1::2].copy() if itemsize == 1 else cast.view(WORDS[itemsize])


def repeated(nbytes, itemsize):
    """Return rows that begin alike, where matches make more than frequencies."""
    row = np.random.default_rng(0).integers(0, 256, 512, np.uint8)
    return np.resize(row, nbytes).view(WORDS[itemsize])


def zeros(nbytes, itemsize):
    return np.zeros(nbytes, np.uint8).view(WORDS[itemsize])


def zarr_document(array):
    blosc = {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "typesize": array.itemsize,
        "blocksize": 1 << 20,
    }
    name = {"u": f"uint{8 * array.itemsize}", "c": "complex128"}[array.dtype.kind]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": name,
        "fill_value": [0.0, 0.0] if name == "complex128" else 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": blosc},
        ],
    }


def store(array, frame):
    Path("a.zarr").mkdir(exist_ok=True)
    Path("a.zarr/zarr.json").write_text(json.dumps(zarr_document(array)))
    Path("a.zarr/c.0").write_bytes(frame)


def by_numcodecs(array, frame):
    return np.frombuffer(numcodecs.Blosc().decode(frame), array.dtype)


def by_zarr(array, frame):
    store(array, frame)
    return zarr.open_array("a.zarr", mode="r")[:]


def by_zarrs(array, frame):
    store(array, frame)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return zarr.open_array("a.zarr", mode="r")[:]


def by_tensorstore(array, frame):
    store(array, frame)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(Path("a.zarr").resolve())}}
    return tensorstore.open(spec).result().read().result()


def by_hdf5(array, frame):
    with h5py.File("a.h5", "w") as file:
        options = hdf5plugin.Blosc(cname="zstd", clevel=1, shuffle=hdf5plugin.Blosc.SHUFFLE)
        made = file.create_dataset(
            "a", array.shape, array.dtype, chunks=array.shape, compression=options
        )
        made.id.write_direct_chunk((0,), bytes(frame))
    with h5py.File("a.h5") as file:
        return file["a"][:]


READERS = [by_numcodecs, by_zarr, by_zarrs, by_tensorstore, by_hdf5]
KINDS = [random, weights, repeated, zeros]
SIZES = {
    "the least": split_frames.MIN_BYTES,
    "one block": 1 << 20,
    "equal blocks": 3 << 20,
    "a short last block": (2 << 20) + 16 * 7919,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("itemsize", WORDS)
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_every_reader_decodes_every_kind_of_frame(reader, itemsize, nbytes):
    for kind in KINDS:
        array = kind(nbytes, itemsize)
        found = reader(array, split_frames.encode(array))
        assert found.tobytes() == array.tobytes(), kind.__name__


@given(
    st.sampled_from(list(WORDS)),
    st.integers(split_frames.MIN_BYTES // 16, 200_000),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
)
def test_any_size_comes_back_and_never_grows_by_more_than_a_header(itemsize, count, most, seed):
    octets = np.random.default_rng(seed).integers(0, most + 1, 16 * count, np.uint8)
    array = octets.view(WORDS[itemsize])
    frame = split_frames.encode(array)
    assert bytes(numcodecs.Blosc().decode(frame)) == octets.tobytes()
    assert len(frame) <= array.nbytes + 16


LIMITS = {2: 0.672, 4: 0.837}
"""Of bfloat16 and single floats; the entropy of their bytes is two thousandths below."""


@pytest.mark.parametrize("itemsize", LIMITS)
def test_weights_come_near_to_their_entropy(itemsize):
    array = weights(1 << 20, itemsize)
    ours, level_1 = len(split_frames.encode(array)), len(LEVEL_1.encode(array))
    assert ours <= level_1 * 1.001
    assert ours < LIMITS[itemsize] * array.nbytes


def test_what_repeats_is_found():
    array = repeated(1 << 20, 4)
    assert len(split_frames.encode(array)) < 0.05 * array.nbytes


def test_many_threads_encode_at_once():
    arrays = [weights((1 << 20) + 16 * n, 2) for n in range(32)]
    with ThreadPoolExecutor(8) as threads:
        frames = list(threads.map(split_frames.encode, arrays))
    for array, frame in zip(arrays, frames, strict=True):
        assert bytes(numcodecs.Blosc().decode(frame)) == array.tobytes()


def test_small_is_made_of_such_frames_and_tiny_ones_are_bloscs():
    compressor = CompressionRules.parse("small").codec("w", 2, 1 << 20).compressor()
    array = weights(1 << 20, 2)
    assert bytes(compressor.encode(array)) == bytes(split_frames.encode(array))
    assert compressor.encode(array[:64]) == LEVEL_1.encode(array[:64])
