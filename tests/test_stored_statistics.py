"""Statistics that a save stores are those that reading its tensors gives."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import h5py
import pytest
import torch

import dcp_zarr
from dcp_zarr import engine
from dcp_zarr.canonical_json import digest
from tests import ranks
from tests.ranks import Part, parts
from tests.test_dtypes import DTYPES, every_pattern

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

CLOSE = ("mean", "std", "norm")
"""What of the statistics depends on the order of additions."""


def both(path):
    """Return the statistics that are stored, and those of the values."""
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        return list(checkpoint.stats()), list(checkpoint.stats(stored=False))


def check_equal(stored, read):
    for one, other in zip(map(asdict, stored), map(asdict, read), strict=True):
        for name, value in one.items():
            expected = other[name]
            if name in CLOSE:
                slack = (
                    1e-12 * other["abs_max"] if other["abs_max"] >= 0 else 0
                )  # where sums cancel
                expected = pytest.approx(expected, rel=1e-9, abs=slack, nan_ok=True)
            elif value != value:  # NaN is NaN
                value, expected = math.isnan(expected), True
            assert value == expected, (one["fqn"], name)


def stored_version(path):
    if path.endswith(".h5"):
        with h5py.File(path) as file:
            return json.loads(file.attrs["dcp_zarr"])["format_version"]
    with dcp_zarr.open_checkpoint(path) as checkpoint:
        schema = checkpoint._source.schema
    return dcp_zarr.schema_json.schema_to_json(schema)["format_version"]


def test_every_dtype_on_several_ranks(path):
    """Cut read chunks and such as overhang are among the tensors of all dtypes."""
    state = {name: every_pattern(name) for name in DTYPES}
    cut = {fqn: parts(whole, (3, 1)) for fqn, whole in state.items()}
    states = [{fqn: of_tensor[rank] for fqn, of_tensor in cut.items()} for rank in range(3)]
    options = {"statistics": True, "read_chunk_bytes": 5000, "thread_count": 3}
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)
    check_equal(*both(path))


@pytest.mark.parametrize("compression", [None, "fast", "small"])
@pytest.mark.parametrize("counts", [(1, 1), (4, 1), (1, 3), (2, 2)])
def test_every_layout(counts, compression, path):
    torch.manual_seed(0)
    state = {"w": 5 + torch.randn(203, 77), "t": torch.randn(77, 203).bfloat16().T}
    cut = {fqn: parts(whole, counts) for fqn, whole in state.items()}
    count = len(cut["w"])
    states = [{fqn: of_tensor[rank] for fqn, of_tensor in cut.items()} for rank in range(count)]
    options = {"statistics": True, "read_chunk_bytes": 4096, "compression": compression}
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), states)
    stored, read = both(path)
    check_equal(stored, read)
    assert stored[0].min == float(state["w"].min())
    assert stored[0].zeros == 0  # what overhangs the tensor does not count


def test_several_parts_of_a_tensor_on_one_rank_and_none_on_another(path):
    whole = torch.arange(40.0).reshape(10, 4)
    first, second, third = parts(whole, (3, 1))
    states = [{"w": [third, first]}, {"w": [second]}, {"step": 7}]
    ranks.save(lambda: dcp_zarr.storage_writer(path, statistics=True), states)
    stored, read = both(path)
    check_equal(stored, read)
    assert stored[0].mean == 19.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(-2.5),
        torch.full((3,), math.nan),
        torch.tensor([1e300, -1e300], dtype=torch.float64),
        torch.tensor([-0.0, 0.0]),
    ],
    ids=["empty", "scalar", "nan", "squares beyond float64", "zeros"],
)
def test_odd_tensors(tensor, path):
    dcp_zarr.save({"w": tensor}, path, statistics=True)
    check_equal(*both(path))


def test_a_region_without_elements_counts_for_nothing(path):
    whole = torch.arange(3.0)
    states = [{"w": Part(whole, region)} for region in ranks.grid((3,), (4,))]
    ranks.save(lambda: dcp_zarr.storage_writer(path, statistics=True), states)
    check_equal(*both(path))


def test_values_that_are_stored_as_bits_are_summed_up_as_numbers(path):
    values = torch.tensor([-1.5, 2.0]).bfloat16()
    dcp_zarr.save({"w": values}, path, statistics=True, dtype_encoding="bits")
    stored, read = both(path)
    check_equal(stored, read)
    assert stored[0].min == -1.5


def test_they_survive_the_loss_of_the_values():
    dcp_zarr.save({"w": torch.ones(5)}, "x.zarr", statistics=True)
    next(Path("x.zarr/w").glob("c*")).unlink()
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        assert checkpoint.stats()[0].norm == pytest.approx(math.sqrt(5))
        with pytest.raises(dcp_zarr.CorruptionError, match="Tensor 'w' .* cannot be read"):
            checkpoint.stats(stored=False)


def test_a_histogram_takes_its_range_from_them(monkeypatch):
    dcp_zarr.save({"w": torch.rand(1000)}, "x.zarr", statistics=True)
    seen = []
    real = engine.read
    monkeypatch.setattr(engine, "read", lambda *args: seen.append(1) or real(*args))
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        assert sum(checkpoint["w"].histogram().counts) == 1000
    assert len(seen) == 1


def test_only_checkpoints_that_hold_them_are_of_version_2(path):
    dcp_zarr.save({"w": torch.ones(5)}, path)
    assert stored_version(path) == 1
    dcp_zarr.save({"w": torch.ones(5)}, path, statistics=True)
    assert stored_version(path) == 2


def test_a_tensor_without_is_read_among_those_that_have_them():
    state = {"a": torch.ones(2), "b": torch.full((3,), 7.0), "c": torch.zeros(4)}
    dcp_zarr.save(state, "x.zarr", statistics=True)
    root = Path("x.zarr/zarr.json")
    document = json.loads(root.read_text())
    schema = document["attributes"]["dcp_zarr"]
    del schema["entries"][1]["statistics"], schema["digest"]
    schema["digest"] = digest(schema)
    root.write_text(json.dumps(document))
    with dcp_zarr.open_checkpoint("x.zarr") as checkpoint:
        assert [(row.fqn, row.mean) for row in checkpoint.stats()] == [("a", 1), ("b", 7), ("c", 0)]


def test_they_do_not_depend_on_threads(path):
    torch.manual_seed(0)
    state = {"w": torch.randn(700, 1000)}
    found = []
    for count in (1, 4):
        options = {"thread_count": count, "read_chunk_bytes": 20_000}
        dcp_zarr.save(state, path, statistics=True, **options)
        found.append(both(path)[0])
    assert found[0] == found[1]


def test_ranks_with_another_option_are_refused(path):
    options = iter([True, False])
    whole = torch.ones(4)
    with pytest.raises(dcp_zarr.SaveError, match="Give all ranks the same options"):
        ranks.save(
            lambda: dcp_zarr.storage_writer(path, statistics=next(options)),
            [{"w": part} for part in parts(whole, (2,))],
        )


def test_what_was_staged_is_checked():
    writer = dcp_zarr.ZarrStorageWriter("x.zarr", statistics=True)
    (planner,), (plan,), metadata = ranks.plan([writer], [{"w": torch.ones(3)}])
    results = [writer.write_data(plan, planner).wait()]
    (staged,) = Path().rglob("0.sums")
    staged.write_bytes(b"\1" + staged.read_bytes()[1:])
    with pytest.raises(dcp_zarr.SaveError, match="What rank 0 staged for .* is not what the"):
        writer.finish(metadata, results)
