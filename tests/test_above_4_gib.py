"""Offsets and sizes that 32 bits do not hold."""

from __future__ import annotations

import pytest
import torch

import dcp_zarr

GIB = 1 << 30
LENGTH = 4 * GIB + 5
MARKS = [0, 1, 2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, LENGTH - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("x.zarr", (LENGTH,)),
        ("x.zarr", (1, LENGTH)),
        ("x.zarr.zip", (LENGTH,)),
        ("x.h5", (1, LENGTH)),
    ],
)
def test_a_tensor_of_more_than_4_gib(path, shape):
    source = torch.zeros(shape, dtype=torch.uint8)
    source.view(-1)[MARKS] = torch.arange(1, 1 + len(MARKS), dtype=torch.uint8)
    dcp_zarr.save({"w": source}, path, compression="fast", sync_files=False)
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        end = checkpoint["w"][..., -6:]
        assert end.view(-1).tolist() == [5, 6, 0, 0, 0, 7]
        assert checkpoint["w"][..., 2 * GIB - 2 : 2 * GIB + 2].view(-1).tolist() == [0, 3, 4, 0]
        assert checkpoint.verify() == []
    assert torch.equal(dcp_zarr.load(path)["w"], source)
