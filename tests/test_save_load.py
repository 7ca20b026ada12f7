"""Round trips with pretend ranks: n ranks save, m ranks load, bit for bit."""

from __future__ import annotations

import threading
import tracemalloc
import weakref
from itertools import product

import numpy as np
import pytest
import torch

import dcp_zarr
from tests import ranks
from tests.ranks import Part, parts


def writer(path, **options):
    return lambda: dcp_zarr.storage_writer(path, sync_files=False, **options)


def values(shape, dtype=torch.float32):
    count = int(np.prod(shape))
    return torch.arange(1, count + 1, dtype=torch.float32).reshape(shape).to(dtype)


def empty_parts(whole, counts):
    return parts(torch.zeros_like(whole), counts)


def round_trip(path, whole, saved, loaded, **options):
    """Save a tensor in one tiling, load it in another; return what was loaded."""
    states = [{"w": part} for part in parts(whole, saved)]
    ranks.save(writer(path, **options), states)
    targets = empty_parts(whole, loaded)
    ranks.load(dcp_zarr.storage_reader(path), [{"w": part} for part in targets])
    return targets[0].whole


SHAPES = [(10,), (7,), (3,), (2,), (1,), (13, 5), (4, 0), (16, 9, 2)]


@pytest.mark.parametrize(("n", "m"), [*product(range(1, 6), range(1, 6))])
def test_rows_saved_by_n_ranks_load_on_m(n, m, path):
    for shape in SHAPES:
        whole = values(shape)
        rest = (1,) * (len(shape) - 1)
        assert torch.equal(round_trip(path, whole, (n, *rest), (m, *rest)), whole)


@pytest.mark.parametrize(("n", "m"), [*product(range(1, 6), range(1, 6))])
def test_columns_saved_by_n_ranks_load_as_rows_on_m(n, m, path):
    whole = values((13, 11), torch.bfloat16)
    assert torch.equal(round_trip(path, whole, (1, n), (m, 1)), whole)


@pytest.mark.parametrize("saved", [(2, 2), (3, 2), (1, 1), (2, 3)])
@pytest.mark.parametrize("loaded", [(1, 1), (2, 3), (5, 1)])
@pytest.mark.parametrize("read_chunk_bytes", [64, 1000, 1 << 20])
def test_meshes_of_two_axes_with_read_chunks_of_any_size(saved, loaded, read_chunk_bytes, path):
    # More than 64 KiB, so that it is not one cut read chunk.
    whole = values((211, 97))
    loaded_whole = round_trip(path, whole, saved, loaded, read_chunk_bytes=read_chunk_bytes)
    assert torch.equal(loaded_whole, whole)


def strided(whole, tp, fsdp):
    """Cut rows as FSDP2 over tensor parallel does: each of `tp` parts is cut again by `fsdp`."""
    found = []
    for start, size in ranks.even(len(whole), tp):
        for offset, rows in ranks.even(size, fsdp):
            box = dcp_zarr.Region((start + offset, 0), (rows, whole.shape[1]))
            found.append(Part(whole, box))
    return found


@pytest.mark.parametrize(
    ("rows", "tp", "fsdp"), [(6, 2, 2), (50257, 2, 4), (4096, 8, 24), (1009, 3, 5), (50257, 4, 16)]
)
def test_fsdp_over_tensor_parallel_rows_that_do_not_divide(rows, tp, fsdp, path):
    whole = values((rows, 24), torch.bfloat16)
    states = [{"w": part} for part in strided(whole, tp, fsdp)]
    metadata = ranks.save(writer(path), states)
    assert dcp_zarr.storage_reader(path).read_metadata() == metadata
    targets = strided(torch.zeros_like(whole), 3, 2)
    ranks.load(dcp_zarr.storage_reader(path), [{"w": part} for part in targets])
    assert torch.equal(targets[0].whole, whole)


def test_a_tensor_of_experts_given_out_unevenly(path):
    """Expert parallel: ranks hold experts 0; 1 and 2; 3 to 6, whole."""
    whole = values((7, 130, 20))
    boxes = [((0, 0, 0), (1, 130, 20)), ((1, 0, 0), (2, 130, 20)), ((3, 0, 0), (4, 130, 20))]
    ranks.save(writer(path), [{"w": Part(whole, dcp_zarr.Region(*box))} for box in boxes])
    assert torch.equal(dcp_zarr.load(path)["w"], whole)


@pytest.mark.parametrize("compression", [None, "fast", "small"])
def test_large_regions_that_do_not_divide(compression, path):
    whole = values((1009, 300), torch.bfloat16)
    loaded = round_trip(
        path, whole, (4, 1), (3, 1), compression=compression, read_chunk_bytes=64 << 10
    )
    assert torch.equal(loaded, whole)


def test_a_tensor_without_axes_and_one_without_elements(path):
    state = {"scalar": torch.tensor(3.5), "none": torch.zeros(0), "rows": torch.zeros(0, 4)}
    dcp_zarr.save(state, path)
    loaded = dcp_zarr.load(path)
    assert loaded["scalar"] == 3.5
    assert (loaded["none"].shape, loaded["rows"].shape) == ((0,), (0, 4))


def test_ranks_without_a_part_and_a_coordinator_without_items(path):
    whole = values((2, 3))
    states = [{}, *({"w": part} for part in parts(whole, (4, 1)))]
    ranks.save(writer(path), states)
    assert torch.equal(dcp_zarr.load(path)["w"], whole)


def test_one_rank_with_several_regions(path):
    whole = values((300, 200))
    pieces = parts(whole, (6, 1))
    ranks.save(writer(path, read_chunk_bytes=10_000), [{"w": pieces[:4]}, {"w": pieces[4:]}])
    assert torch.equal(dcp_zarr.load(path)["w"], whole)


def test_regions_that_are_no_grid(path):
    whole = values((300, 200))
    boxes = [
        ((0, 0), (100, 200)),
        ((100, 0), (200, 77)),
        ((100, 77), (123, 123)),
        ((223, 77), (77, 123)),
    ]
    states = [{"w": Part(whole, dcp_zarr.Region(*box))} for box in boxes]
    metadata = ranks.save(writer(path, read_chunk_bytes=10_000), states)
    assert torch.equal(dcp_zarr.load(path)["w"], whole)
    assert dcp_zarr.storage_reader(path).read_metadata() == metadata


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[0].expand(5, -1),
        lambda t: torch.nn.Parameter(t),
        lambda t: t.flip(0)[1:],
        lambda t: torch.view_as_complex(t[:, :10].reshape(-1, 5, 2).contiguous()).conj(),
        lambda t: torch._neg_view(t),
        lambda t: t.reshape(2, 3, 10, 10).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "parameter", "view", "conj", "neg", "channels_last"],
)
def test_any_view_is_saved_as_its_values(make):
    source = make(torch.randn(20, 30))
    dcp_zarr.save({"w": source}, "x.zarr")
    assert torch.equal(dcp_zarr.load("x.zarr")["w"], source.detach().resolve_conj().resolve_neg())


def test_only_the_view_is_stored_not_its_base(path):
    base = torch.randn(1_000_000)
    dcp_zarr.save({"w": base[10:20]}, path, compression=None)
    assert dcp_zarr.open_checkpoint(path)["w"].stored_nbytes == 44


def test_targets_that_are_not_contiguous_are_filled_in_place(path):
    whole = values((30, 40))
    dcp_zarr.save({"w": whole}, path)
    base = torch.zeros(40, 60)
    target = base[:, ::2].t()
    target_part = Part(target, dcp_zarr.Region.whole((30, 40)))
    ranks.load(dcp_zarr.storage_reader(path), [{"w": target_part}])
    assert torch.equal(target, whole)
    assert not base[:, 1::2].any()


def test_more_read_chunks_than_a_task_holds(path):
    whole = torch.randint(0, 255, (3000, 4096), dtype=torch.uint8)
    loaded = round_trip(path, whole, (2, 1), (3, 1), read_chunk_bytes=4096, compression=None)
    assert torch.equal(loaded, whole)


@pytest.mark.parametrize("thread_count", [1, 2, 7])
def test_any_number_of_threads(thread_count, path):
    whole = values((500, 600))
    dcp_zarr.save({"w": whole, "v": whole * 2}, path, thread_count=thread_count)
    loaded = dcp_zarr.load(path, thread_count=thread_count)
    assert torch.equal(loaded["w"], whole)
    assert torch.equal(loaded["v"], whole * 2)


class CountingPlanner(ranks.SavePlanner):
    """Resolves each tensor to memory of its own, and counts how many are alive at once."""

    def count(self):
        self.lock, self.made, self.most = threading.Lock(), [], 0

    def resolve_data(self, item):
        memory = super().resolve_data(item).numpy().copy()
        with self.lock:
            self.made.append(weakref.ref(memory))
            self.most = max(self.most, sum(made() is not None for made in self.made))
        return torch.from_numpy(memory)  # keeps the array alive, as do its views


TEMPORARIES = {
    "large": (20, (1 << 20,), 1),
    "many in a task": (200, (30,), 1),
    "cut": (50, (401, 70), 2),
    "large and cut": (8, (4001, 512), 2),
}


@pytest.mark.parametrize("compression", [None, "fast"])
@pytest.mark.parametrize(("tensors", "shape", "count"), TEMPORARIES.values(), ids=TEMPORARIES)
def test_at_most_one_more_tensor_than_threads_is_resolved(tensors, shape, count, compression, path):
    whole = {f"w{n}": values(shape) + n for n in range(tensors)}
    cut = {fqn: parts(tensor, (count, 1)[: len(shape)]) for fqn, tensor in whole.items()}
    states = [{fqn: of[rank] for fqn, of in cut.items()} for rank in range(count)]
    writers = [writer(path, thread_count=2, compression=compression)() for _ in states]
    planners, plans, metadata = ranks.plan(writers, states)
    results = []
    for one, plan, planner in zip(writers, plans, planners, strict=True):
        planner.__class__ = CountingPlanner
        planner.count()
        results.append(one.write_data(plan, planner).wait())
        assert len(planner.made) == len(whole)
        assert planner.most <= 3
    writers[0].finish(metadata, results)
    loaded = dcp_zarr.load(path)
    assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in whole.items())


@pytest.mark.parametrize("compression", [None, "fast"])
def test_memory_stays_within_the_budget(compression, path):
    # Transposed, so that every read chunk is copied as well as encoded.
    source = torch.randn(6000, 4000).t()
    budget = 16 << 20
    options = {"thread_count": 2, "memory_budget_bytes": budget, "sync_files": False}
    make = dcp_zarr.storage_writer(path, compression=compression, **options)
    planners, plans, metadata = ranks.plan([make], [{"w": source}])
    tracemalloc.start()
    results = [make.write_data(plans[0], planners[0]).wait()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    make.finish(metadata, results)
    assert peak < budget
    assert torch.equal(dcp_zarr.load(path)["w"], source)
