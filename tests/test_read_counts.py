"""How much is read for what one asks, whatever the container: counted at the seam."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import dcp_zarr
from dcp_zarr.checkpoint import Checkpoint
from dcp_zarr.containers.by_path import open_source
from tests.test_foreign import SAVERS

FOREIGN = ["pt", "older pt", "dcp", "safetensors"]


class CountingSource:
    """A source that notes which read chunks are asked for, and how many bytes are read."""

    def __init__(self, source):
        self._source = source
        self.read_chunks = []
        self.nbytes = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    @contextmanager
    def open_object(self, array, write_chunk):
        with self._source.open_object(array, write_chunk) as stored:
            yield CountingObject(stored, array, self)


class CountingObject:
    def __init__(self, stored, array, counts):
        self._stored, self._array, self._counts = stored, array, counts

    def extents(self, read_chunks):
        self._counts.read_chunks += [(self._array.fqn, *place) for place in read_chunks]
        return self._stored.extents(read_chunks)

    def read_into(self, offset, buffers):
        self._counts.nbytes += sum(map(len, buffers))
        self._stored.read_into(offset, buffers)


def counted(path):
    source = CountingSource(open_source(str(path)))
    return Checkpoint(source), source


TENSORS = {"layers.0.w": torch.arange(1024 * 512.0).reshape(1024, 512), "layers.1.w": torch.ones(8)}


@pytest.fixture(params=["x.zarr", "x.zarr.zip", "x.h5", *FOREIGN])
def any_path(request, tmp_path):
    path = tmp_path / ("x" if request.param in FOREIGN else request.param)
    if request.param in FOREIGN:
        SAVERS[request.param](dict(TENSORS), path)
    else:
        dcp_zarr.save(dict(TENSORS), path, read_chunk_bytes=1 << 20, compression=None)
    return path


def test_open_list_select_and_draw_read_no_values(any_path):
    checkpoint, counts = counted(any_path)
    assert sorted(checkpoint) == list(TENSORS)
    assert checkpoint.select("layers.0").params == 1024 * 512
    for drawn in (checkpoint, checkpoint.tree(), checkpoint["layers.0.w"], checkpoint.totals()):
        assert repr(drawn)
        assert getattr(drawn, "_repr_html_", str)
    assert checkpoint["layers.0.w"].region_map()
    assert checkpoint._ipython_key_completions_()
    assert (counts.read_chunks, counts.nbytes) == ([], 0)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (700, range(700, 701)),
        ((slice(511, 513), 3), range(511, 513)),
        ((..., slice(0, 0)), range(0)),
        (slice(None, None, -512), range(511, 1024)),
    ],
)
def test_a_slice_reads_the_read_chunks_that_it_touches(index, rows, any_path):
    checkpoint, counts = counted(any_path)
    values = checkpoint["layers.0.w"].numpy(index)
    assert np.array_equal(values, TENSORS["layers.0.w"].numpy()[index])
    places = {(r // 512, 0) for r in rows}
    assert sorted(place for _, *place in counts.read_chunks) == sorted(map(list, places))
    assert counts.nbytes <= len(places) * ((1 << 20) + 4)


def test_a_selection_loads_nothing_else(any_path):
    checkpoint, counts = counted(any_path)
    checkpoint.select("layers.1").load()
    assert {fqn for fqn, *_ in counts.read_chunks} == {"layers.1.w"}


def test_stored_statistics_make_tables_and_layer_maps_read_nothing(path):
    dcp_zarr.save(dict(TENSORS), path, statistics=True)
    checkpoint, counts = counted(path)
    assert checkpoint.stats()[1].mean == 1
    for quantity in ("std", "abs_max", "zeros", "norm"):
        assert checkpoint.layer_map(quantity)
    assert (counts.read_chunks, counts.nbytes) == ([], 0)
