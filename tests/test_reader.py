"""Loading through DCP into any target, and what is refused."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcp_zarr
from dcp_zarr import ZarrStorageReader, tensors
from dcp_zarr.errors import CorruptionError, TensorMismatchError, UnsafeObjectError
from dcp_zarr.region import Region
from tests import ranks


def load(path, state, **options):
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path, **options), no_dist=True)


def failure(caught):
    """Return the first rank's own exception."""
    return next(iter(caught.value.failures.values()))[0]


def test_tensors_are_filled_in_place_and_objects_replaced(path):
    dcp_zarr.save({"w": torch.ones(3), "o": {"lr": 0.1}, "t": (1, 2)}, path)
    state = {"w": torch.zeros(3), "o": {"lr": 0.0}, "t": None}
    kept = state["w"]
    load(path, state)
    assert state["w"] is kept
    assert kept.tolist() == [1, 1, 1]
    assert (state["o"], state["t"]) == ({"lr": 0.1}, (1, 2))


@pytest.mark.parametrize(
    ("saved", "target"),
    [("bfloat16", "float32"), ("float16", "float64"), ("int8", "int64"), ("float32", "complex64")],
)
def test_widening_is_allowed(saved, target, path):
    values = torch.tensor([1.5, -2.0, 3.0]).to(tensors.torch_dtype(saved))
    dcp_zarr.save({"w": values}, path)
    state = {"w": torch.zeros(3, dtype=tensors.torch_dtype(target))}
    load(path, state)
    assert torch.equal(state["w"], values.to(state["w"].dtype))


@pytest.mark.parametrize(
    ("saved", "target"), [("float32", "bfloat16"), ("int64", "float32"), ("float32", "int64")]
)
def test_narrowing_is_refused_unless_allowed(saved, target, path):
    values = torch.tensor([1, 2, 3], dtype=tensors.torch_dtype(saved))
    dcp_zarr.save({"w": values}, path)
    state = {"w": torch.zeros(3, dtype=tensors.torch_dtype(target))}
    with pytest.raises(dcp.CheckpointException) as caught:
        load(path, state)
    assert isinstance(failure(caught), TensorMismatchError)
    expected = f"Tensor 'w' is torch.{saved} in {path!r}, but its target is torch.{target}, which"
    assert str(failure(caught)).startswith(expected)
    assert not state["w"].any()
    load(path, state, allow_cast=True)
    assert torch.equal(state["w"], values.to(state["w"].dtype))


def test_wide_targets_are_read_in_slabs(path):
    source = torch.randn(9000, 1000)
    dcp_zarr.save({"w": source}, path, sync_files=False)
    state = {"w": torch.zeros(9000, 1000, dtype=torch.float64)}
    load(path, state)
    assert torch.equal(state["w"], source.double())


def test_conjugated_and_negated_targets(path):
    source = torch.randn(4, dtype=torch.complex64)
    dcp_zarr.save({"w": source}, path)
    state = {"w": torch.zeros(4, dtype=torch.complex64).conj()}
    load(path, state)
    assert torch.equal(state["w"].resolve_conj(), source)


def test_parameters_that_require_grad():
    dcp_zarr.save({"w": torch.ones(2)}, "x.zarr")
    state = {"w": torch.nn.Parameter(torch.zeros(2))}
    load("x.zarr", state)
    assert state["w"].tolist() == [1, 1]


def test_a_planner_may_give_temporary_buffers(path):
    class Planner(DefaultLoadPlanner):
        calls: list = []  # noqa: RUF012

        def resolve_tensor(self, item):
            self.calls.append(("resolve", item.dest_index.fqn))
            return torch.empty(tuple(item.lengths))

        def commit_tensor(self, item, tensor):
            self.calls.append(("commit", item.dest_index.fqn))
            self.state_dict[item.dest_index.fqn].copy_(tensor)

    source = {f"w{n}": torch.randn(5) for n in range(100)}
    dcp_zarr.save(source, path, sync_files=False)
    state = {fqn: torch.zeros(5) for fqn in source}
    planner = Planner()
    dcp.load(state, storage_reader=dcp_zarr.storage_reader(path), planner=planner, no_dist=True)
    assert all(torch.equal(state[fqn], source[fqn]) for fqn in source)
    assert sorted(planner.calls) == sorted(
        [("commit", f) for f in source] + [("resolve", f) for f in source]
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_torchs_own_partial_load_works():
    dcp_zarr.save(
        {"m": {"a": torch.ones(2), "b": torch.zeros(2)}, "l": [torch.ones(1), 5]}, "x.zarr"
    )
    assert list(_load_state_dict_from_keys("m.a", storage_reader=ZarrStorageReader("x.zarr"))) == [
        "m"
    ]
    assert _load_state_dict_from_keys({"l"}, storage_reader=ZarrStorageReader("x.zarr")) == {
        "l": [torch.ones(1), 5]
    }


def test_the_checkpoint_id_may_be_given_instead_of_a_path():
    dcp.save(
        {"w": torch.ones(2)},
        storage_writer=dcp_zarr.ZarrStorageWriter(),
        checkpoint_id=Path("y.zarr"),
        no_dist=True,
    )
    state = {"w": torch.zeros(2)}
    reader = ZarrStorageReader()
    dcp.load(state, storage_reader=reader, checkpoint_id="y.zarr", no_dist=True)
    assert state["w"].tolist() == [1, 1]
    assert reader.checkpoint_id == "y.zarr"


def test_one_writer_and_one_reader_serve_many_checkpoints(path):
    writer, reader = dcp_zarr.storage_writer(path), dcp_zarr.storage_reader(path)
    ids = set()
    for n in range(3):
        state = {"w": torch.full((2,), float(n))}
        metadata = dcp.save(state, storage_writer=writer, checkpoint_id=f"{n}-{path}", no_dist=True)
        ids.add(metadata.storage_meta.save_id)
    assert len(ids) == 3
    for n in range(3):
        state = {"w": torch.zeros(2)}
        dcp.load(state, storage_reader=reader, checkpoint_id=f"{n}-{path}", no_dist=True)
        assert state["w"].tolist() == [n, n]


@pytest.mark.parametrize("path", ["missing.zarr", "."])
def test_what_cannot_be_opened_says_why_once(path):
    with pytest.raises(
        dcp.CheckpointException, match="There is no checkpoint at|it has no zarr.json"
    ):
        dcp.load({"w": torch.zeros(1)}, storage_reader=ZarrStorageReader(path), no_dist=True)


def test_a_directory_of_checkpoints_names_one_of_them(path):
    dcp_zarr.save({"w": torch.zeros(1)}, f"run/step-1-{path}")
    with pytest.raises(dcp_zarr.CheckpointNotFoundError, match=f"such as 'run/step-1-{path}'"):
        dcp_zarr.open_checkpoint("run")


def test_a_path_is_needed():
    with pytest.raises(
        dcp.CheckpointException, match="No path: give ZarrStorageWriter one, or dcp.save"
    ):
        dcp.save({}, storage_writer=dcp_zarr.ZarrStorageWriter(), no_dist=True)
    with pytest.raises(
        dcp.CheckpointException, match="No path: give ZarrStorageReader one, or dcp.load"
    ):
        dcp.load({}, storage_reader=ZarrStorageReader(), no_dist=True)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("compression", [None, "fast", "small"])
def test_every_flipped_byte_of_values_and_documents_is_noticed(compression):
    source = torch.randn(64, 40)
    dcp_zarr.save({"m": {"w": source}, "step": 3}, "x.zarr", compression=compression)
    writer_paths = [
        Path("x.zarr/m/w/zarr.json"),
        Path("x.zarr/m/w/c.0.0"),
        Path("x.zarr/zarr.json"),
    ]
    for path in writer_paths:
        original = path.read_bytes()
        for position in range(0, len(original), max(len(original) // 150, 1)):
            flip(path, position)
            try:
                loaded = dcp_zarr.load("x.zarr")
            except dcp_zarr.DcpZarrError:
                pass
            else:
                assert torch.equal(loaded["m"]["w"], source)
                assert loaded["step"] == 3
            path.write_bytes(original)


def indexed_checkpoint():
    source = torch.randn(1000, 400)
    dcp_zarr.save({"w": source}, "x.zarr", compression=None)
    return source


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "'w/c.0.0' is missing"),
        (
            lambda p: p.write_bytes(p.read_bytes()[:1000]),
            "The checksum of its index does not hold",
        ),
        (lambda p: p.write_bytes(b""), "The checksum of its index does not hold"),
        (lambda p: flip(p, 5), r"checksum of its read chunk \[0:500, 0:400\] does not hold"),
        (lambda p: flip(p, -1), "The checksum of its index does not hold"),
    ],
    ids=["deleted", "truncated", "empty", "value", "index"],
)
def test_damage_names_tensor_region_and_path(damage, message):
    indexed_checkpoint()
    damage(Path("x.zarr/w/c.0.0"))
    with pytest.raises(
        CorruptionError,
        match=r"^Tensor 'w' \[0:1000, 0:400\] in '.*x.zarr' cannot be read: .*" + message,
    ) as caught:
        dcp_zarr.load("x.zarr")
    assert (caught.value.fqn, caught.value.region) == ("w", "[0:1000, 0:400]")


def test_a_changed_array_document_is_refused():
    indexed_checkpoint()
    document = Path("x.zarr/w/zarr.json")
    document.write_text(document.read_text().replace("n400", "n401"))
    with pytest.raises(CorruptionError, match="'w/zarr.json' was changed after the save"):
        dcp_zarr.load("x.zarr")


def test_a_changed_root_is_refused():
    indexed_checkpoint()
    document = Path("x.zarr/zarr.json")
    document.write_text(document.read_text().replace("float32", "float16"))
    with pytest.raises(CorruptionError, match="The schema in '.*' was changed after the save"):
        dcp_zarr.open_checkpoint("x.zarr")
    document.write_text("{")
    with pytest.raises(CorruptionError, match="is not JSON"):
        dcp_zarr.open_checkpoint("x.zarr")


def test_a_newer_format_is_refused():
    indexed_checkpoint()
    document = Path("x.zarr/zarr.json")
    document.write_text(document.read_text().replace('"format_version":1', '"format_version":3'))
    with pytest.raises(
        dcp_zarr.FormatError, match="has format version 3; this dcp_zarr reads up to 2"
    ):
        dcp_zarr.open_checkpoint("x.zarr")


@pytest.mark.parametrize("compression", [None, "fast"])
@pytest.mark.parametrize("first", range(9))
def test_columns_as_wide_as_a_read_chunk_may_begin_anywhere(first, compression, path):
    whole = torch.arange(12 * 12.0).reshape(12, 12)
    options = {"read_chunk_bytes": 96, "compression": compression}
    thirds = [{"w": part} for part in ranks.parts(whole, (1, 3))]
    ranks.save(lambda: dcp_zarr.storage_writer(path, **options), thirds)
    target = torch.zeros(12, 12)
    box = Region((0, first), (12, 4))
    ranks.load(dcp_zarr.storage_reader(path), [{"w": ranks.Part(target, box)}])
    columns = slice(first, first + 4)
    assert torch.equal(target[:, columns], whole[:, columns])


def test_very_many_regions_are_told_as_one_of_each_tensor(monkeypatch, path):
    whole = torch.arange(40.0).reshape(10, 4)
    ranks.save(
        lambda: dcp_zarr.storage_writer(path), [{"w": p} for p in ranks.parts(whole, (5, 1))]
    )
    reader = dcp_zarr.storage_reader(path)
    assert len(reader.read_metadata().state_dict_metadata["w"].chunks) == 5
    monkeypatch.setattr("dcp_zarr.metadata_words.MAX_PUBLISHED_REGIONS", 4)
    (box,) = reader.read_metadata().state_dict_metadata["w"].chunks
    assert (tuple(box.offsets), tuple(box.sizes)) == ((0, 0), (10, 4))
    target = torch.zeros(10, 4)
    ranks.load(reader, [{"w": ranks.Part(target, box)} for box in ranks.grid((10, 4), (3, 1))])
    assert torch.equal(target, whole)


def test_other_zarr_groups_and_files_are_not_checkpoints():
    Path("z").mkdir()
    Path("z/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(
        dcp_zarr.FormatError, match="is a Zarr group, but not a dcp_zarr checkpoint"
    ):
        dcp_zarr.open_checkpoint("z")
    with pytest.raises(
        dcp_zarr.FormatError, match="no zip file and no HDF5 file, nor one of torch"
    ):
        dcp_zarr.open_checkpoint("z/zarr.json")


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_failing_rank_logs_at_once_where_others_wait(is_alone, caplog, monkeypatch):
    indexed_checkpoint()
    Path("x.zarr/w/c.0.0").unlink()
    monkeypatch.setattr("dcp_zarr.tensors.is_alone", lambda: is_alone)
    with caplog.at_level(logging.ERROR, "dcp_zarr"), pytest.raises(dcp.CheckpointException):
        load("x.zarr", {"w": torch.zeros(1000, 400)})
    logged = "Loading from x.zarr failed on this rank." in caplog.text
    assert logged is not is_alone


VALUES = [
    None, True, 0, -1, 2**63, 2**70, 0.1, -0.0, float("inf"), float("nan"), "", "ü\n", [], [1, [2]],
    {}, {"a": {"b": [1.5, None]}}, {1: 2}, (1, 2), {"a": (1,)}, b"bytes", {1, 2}, torch.Size([2]),
    "\ud800",
    [True, 1], 1 + 2j, io.StringIO, torch.float32, "x" * 3_000_000,
]  # fmt: skip


def test_any_object_comes_back_equal_and_of_its_type(path):
    # DCP takes a dict apart, so it needs a tuple around it.
    state = {f"o{n}": (v,) if isinstance(v, (dict, list)) else v for n, v in enumerate(VALUES)}
    dcp_zarr.save(state, path)
    loaded = {f"o{n}": None for n in range(len(VALUES))}
    load(path, loaded)
    for n, value in enumerate(VALUES):
        found = loaded[f"o{n}"]
        if isinstance(value, (dict, list)):
            (found,) = found
        assert type(found) is type(value)
        assert found == value or value != value
        assert str(found) == str(value)


def test_values_that_json_holds_exactly_are_seen_without_torch(path):
    state = {"lr": 0.1, "betas": [0.9, 0.95], "name": "adam", "none": None, "tuple": (1, 2)}
    dcp_zarr.save(state, path)
    entries = dcp_zarr.open_checkpoint(path).objects._entries
    seen = {fqn: entry.json[0] for fqn, entry in entries.items() if entry.json}
    assert seen == {"lr": 0.1, "betas": [0.9, 0.95], "name": "adam", "none": None}


def test_one_list_in_two_places_stays_one(path):
    inner: list = []
    dcp_zarr.save({"o": ({"a": inner, "b": inner},)}, path)
    (found,) = dcp_zarr.load(path)["o"]
    assert found["a"] is found["b"]


def test_objects_that_could_run_code_are_refused_unless_trusted(path):
    dcp_zarr.save({"o": (io.StringIO,)}, path)
    message = (
        "'o' is not loaded, since unpickling it could run code: Unsupported global: GLOBAL _io"
    )
    with pytest.raises(UnsafeObjectError, match=message):
        dcp_zarr.load(path)
    assert dcp_zarr.load(path, weights_only=False)["o"] == (io.StringIO,)
    objects = dcp_zarr.open_checkpoint(path).objects
    assert list(objects) == ["o"]
    with pytest.raises(UnsafeObjectError, match="If you trust the checkpoint: dcp_zarr.load"):
        objects["o"]
