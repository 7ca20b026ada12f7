"""Random tensors in random boxes on some ranks come back, bit for bit, in any other boxes."""

from __future__ import annotations

from types import SimpleNamespace

import numcodecs
import numpy as np
import pytest
import torch

import dcp_zarr
from dcp_zarr.region import Region
from tests import ranks

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64]
CODECS = [None, "fast", "small", numcodecs.Zstd(1), numcodecs.GZip(1)]


def boxes(rng, shape, count):
    """Cut a tensor into about so many boxes: by a mesh, or at random."""
    if shape and rng.random() < 0.5:
        counts = [1] * len(shape)
        counts[rng.integers(len(shape))] = count
        return ranks.grid(shape, tuple(counts))
    found = [Region.whole(shape)]
    for _ in range(count - 1):
        box = found.pop(rng.integers(len(found)))
        axes = [axis for axis, n in enumerate(box.sizes) if n > 1]
        at = [0] * len(shape)
        if axes:
            axis = rng.choice(axes)
            at[axis] = int(rng.integers(1, box.sizes[axis]))
            ends = tuple(a or n for a, n in zip(at, box.sizes, strict=True))
            found.append(Region(box.offsets, ends))
        offsets = tuple(o + a for o, a in zip(box.offsets, at, strict=True))
        found.append(Region(offsets, tuple(e - o for e, o in zip(box.ends, offsets, strict=True))))
    return found


def random_tensor(rng):
    """Return random bits of any shape, some of which compress far better than others."""
    axes, dtype = int(rng.integers(4)), DTYPES[rng.integers(len(DTYPES))]
    whole = torch.empty([int(2 ** rng.uniform(-0.2, 20 / axes)) for _ in range(axes)], dtype=dtype)
    nbytes = whole.numel() * dtype.itemsize
    content = rng.integers(0, 256, nbytes, np.uint8)
    content[: int(rng.random() * nbytes)] = 0
    return torch.frombuffer(content, dtype=dtype).reshape(whole.shape) if nbytes else whole


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("seed", range(60))
def test_any_boxes_to_any_others(tmp_path, seed):
    rng = np.random.default_rng(seed)
    states = [{"step": 3}, *[{} for _ in range(rng.integers(5))]]
    wholes = {f"a.{number}": random_tensor(rng) for number in range(rng.integers(1, 6))}
    for fqn, whole in wholes.items():
        for box in boxes(rng, tuple(whole.shape), int(rng.integers(1, 9))):
            states[rng.integers(len(states))].setdefault(fqn, []).append(ranks.Part(whole, box))
    options = {
        "compression": CODECS[rng.integers(len(CODECS))],
        "read_chunk_bytes": int(2 ** rng.uniform(4, 18)),
        "write_chunk_bytes": int(2 ** rng.uniform(8, 24)),
        "thread_count": int(rng.integers(1, 4)),
        "memory_budget_bytes": int(2 ** rng.uniform(10, 26)),
    }
    path = tmp_path / ["x.zarr", "x.zarr.zip", "x.h5"][seed % 3]
    if path.suffix == ".h5":
        options.pop("write_chunk_bytes")
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)
    assert list(tmp_path.iterdir()) == [path]
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        assert not checkpoint.verify()
    for fqn, whole in wholes.items():
        for box in boxes(rng, tuple(whole.shape), int(rng.integers(1, 9))):
            out = torch.zeros(box.sizes, dtype=whole.dtype)
            ranks.load(
                dcp_zarr.storage_reader(path), [{fqn: SimpleNamespace(region=box, local=out)}]
            )
            assert torch.equal(bits(out), bits(whole[box.slices()]))
