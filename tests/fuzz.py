"""Changes stored checkpoints at random: each is read exactly, or refused with an error of ours.

Run as a program: ``python -m tests.fuzz KIND SEED COUNT``. Changes are tried in a child process
with little memory and time, whose death is a violation like a wrong value, an error of others, a
file opened outside, or a pickle that runs. Prints the seeds of violations, and exits with 1.
"""

from __future__ import annotations

import ctypes
import io
import json
import logging
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

MEMORY_BYTES = 1 << 30
"""More than the process has at first."""
SECONDS = 20
"""For one change."""
NUMBERS = [0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 2**64]
VALUES = [
    *NUMBERS, 1e308, 0.5, True, None, "", "w", "../w", "/etc/passwd", "a" * 300, "~_objects",
    "float32", "bfloat16", "complex32", "bits", "crc32c", "blosc", "\ud800", "\0", [], {}, [0],
    [[0]], [1, 1], [2**40, 2**40], {"step": [1, 1], "count": [1000, 1000]},
]  # fmt: skip


class Evil:
    """Makes a directory when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def state():
    import torch

    rows = torch.arange(50 * 40.0).reshape(50, 40)
    return {
        "m": {"a": rows, "b": rows[:7].bfloat16(), "c": torch.zeros(701)},
        "n": torch.ones(()),
        "e": torch.zeros(0, 3),
        "step": 7,
        "o": ({1, 2}, "x"),
        "evil": Evil(),
    }


SAFE = ("m", "n", "e", "step", "o")


# What is changed.


def flip(dice, content):
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        if changed:
            changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def number(dice, content):
    """Put an extreme number somewhere."""
    changed = bytearray(content)
    size = dice.choice((1, 2, 4, 8))
    at = dice.randrange(max(len(changed) - size, 1))
    value = dice.choice(NUMBERS) % 256**size
    if value == 2**64 - 1:  # the crc32c of four bytes of ones is four bytes of ones
        value -= 1
    changed[at : at + size] = value.to_bytes(size, "little")
    return bytes(changed)


def cut(dice, content):
    return content[: dice.randrange(len(content) + 1)]


def insert(dice, content):
    at = dice.randrange(len(content) + 1)
    return content[:at] + dice.randbytes(dice.choice((1, 4, 4096))) + content[at:]


def remove(dice, content):
    at = dice.randrange(len(content) + 1)
    return content[:at] + content[at + dice.choice((1, 4, 512)) :]


def splice(dice, content):
    """Copy a part elsewhere."""
    size = dice.choice((8, 64, 1024))
    source, target = (dice.randrange(len(content) + 1) for _ in range(2))
    part = content[source : source + size]
    return content[:target] + part + content[target + len(part) :]


def pickled(dice, content):
    return pickle.dumps(Evil()) if dice.random() < 0.5 else b""


BYTES = [flip, flip, flip, number, number, cut, insert, remove, splice, pickled]


def near_ends(dice, change):
    """Change only the first or last part of a file, where its structure stands."""

    def changed(dice, content):
        size = min(dice.choice((64, 512, 4096)), len(content))
        if dice.random() < 0.5:
            return change(dice, content[:size]) + content[size:]
        return content[: len(content) - size] + change(dice, content[len(content) - size :])

    return changed if dice.random() < 0.7 else change


def change_value(dice, value, depth=0):
    """Change something somewhere in a JSON value."""
    if isinstance(value, (dict, list)) and value and dice.random() < 0.93:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, changed = dice.choice(list(keys)), value.copy()
        way = dice.random()
        if way < 0.04:
            del changed[key]
        elif way < 0.07 and isinstance(value, list):
            changed.insert(dice.randrange(len(value)), value[key])
        elif way < 0.1 and isinstance(value, dict):
            changed[dice.choice(("fqn", "json", "path", "x", "shape"))] = value[key]
        else:
            changed[key] = change_value(dice, value[key], depth + 1)
        return changed
    if isinstance(value, str) and value and dice.random() < 0.3:
        at = dice.randrange(len(value))
        return value[:at] + dice.choice("0/~.a\0é") + value[at + 1 :]
    if type(value) is int and dice.random() < 0.5:
        return value + dice.choice((-1, 1, 7, -value, value, 2**32))
    return dice.choice(VALUES)


def new_schema(dice, schema):
    from dcp_zarr.canonical_json import digest

    schema = {key: value for key, value in schema.items() if key != "digest"}
    for _ in range(dice.choice((1, 1, 2, 3))):
        schema = change_value(dice, schema)
    return {**schema, "digest": digest(schema)} if isinstance(schema, dict) else schema


# Containers: each makes a checkpoint in the folder, and changes it; says whether it then lies well.


def save(path, compression):
    import dcp_zarr

    dcp_zarr.save(
        state(), path, read_chunk_bytes=4096, compression=compression, statistics=True,
        sync_files=False,
    )  # fmt: skip


class Directory:
    path = "x.zarr"

    def raw(self, dice):
        files = sorted(p for p in Path(self.path).rglob("*") if p.is_file())
        file = dice.choice([*files, Path(self.path, "zarr.json")])
        content, way = file.read_bytes(), dice.random()
        if way < 0.85:
            file.write_bytes(near_ends(dice, dice.choice(BYTES))(dice, content))
            return
        file.unlink()
        if way < 0.87:
            file.symlink_to("/etc/passwd")
        elif way < 0.89:
            file.symlink_to("/dev/zero")
        elif way < 0.91:
            os.mkfifo(file)
        elif way < 0.93:
            file.mkdir()
        elif way < 0.95:
            file.symlink_to(file.name)
        elif way < 0.98:
            file.write_bytes(dice.choice(files[1:]).read_bytes() if file not in files[1:] else b"")

    def schema(self, dice):
        root = Path(self.path, "zarr.json")
        document = json.loads(root.read_bytes())
        changed = new_schema(dice, document["attributes"]["dcp_zarr"])
        document["attributes"]["dcp_zarr"] = changed
        root.write_text(json.dumps(document))


class Zip(Directory):
    path = "x.zarr.zip"

    def raw(self, dice):
        file = Path(self.path)
        file.write_bytes(near_ends(dice, dice.choice(BYTES))(dice, file.read_bytes()))

    def schema(self, dice):
        with zipfile.ZipFile(self.path) as packed:
            entries = {name: packed.read(name) for name in packed.namelist()}
        document = json.loads(entries["zarr.json"])
        changed = new_schema(dice, document["attributes"]["dcp_zarr"])
        document["attributes"]["dcp_zarr"] = changed
        entries["zarr.json"] = json.dumps(document).encode()
        made = io.BytesIO()
        method = dice.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
        with zipfile.ZipFile(made, "w", method) as packed:
            for name, content in entries.items():
                packed.writestr(name, content)
        Path(self.path).write_bytes(made.getvalue())


class HDF5:
    path = "x.h5"

    def raw(self, dice):
        file = Path(self.path)
        content = file.read_bytes()
        if dice.random() < 0.3:  # with a checksum that holds where an object begins
            content = with_header_checksum(dice, content)
        else:
            content = near_ends(dice, dice.choice(BYTES))(dice, content)
        file.write_bytes(content)

    def schema(self, dice):
        import h5py

        with h5py.File(self.path, "r+") as file:
            way = dice.random()
            if way < 0.7:
                text = json.dumps(new_schema(dice, json.loads(file["~_schema"][()])))
                del file["~_schema"]
                file["~_schema"] = np.bytes_(text.encode("utf-8", "surrogatepass"))
            elif way < 0.85:
                self._table(dice, file["~_read_chunks"])
            else:
                where = dice.choice([file, *(file[p] for p in ("m/a", "m/c", "n", "e"))])
                told = json.loads(where.attrs["dcp_zarr"])
                where.attrs["dcp_zarr"] = np.bytes_(json.dumps(change_value(dice, told)))

    def _table(self, dice, table):
        from dcp_zarr.containers.hdf5_format import table_digest

        rows = table[:]
        rows[dice.randrange(len(rows)), dice.randrange(3)] = dice.choice(NUMBERS) % 2**64
        table[:] = rows
        claims = json.loads(table.attrs["dcp_zarr"])
        claims["sha256"] = table_digest(rows)
        table.attrs["dcp_zarr"] = np.bytes_(json.dumps(claims))


def with_header_checksum(dice, content):
    """Change a version 2 object header of HDF5, and make its checksum hold again."""
    places = [at for at in range(len(content) - 4) if content[at : at + 4] == b"OHDR"]
    at = dice.choice(places)
    flags = content[at + 5]
    start = at + 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0)
    size = 1 << (flags & 3)
    end = start + size + int.from_bytes(content[start : start + size], "little")
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2))):
        changed[dice.randrange(at + 5, end)] = dice.choice((dice.randrange(256), 0, 255))
    changed[end : end + 4] = lookup3(bytes(changed[at:end])).to_bytes(4, "little")
    return bytes(changed)


def lookup3(key):
    """Return the checksum of HDF5's metadata, Bob Jenkins' lookup3."""

    def rot(x, k):
        return ((x << k) | (x >> (32 - k))) & 0xFFFFFFFF

    a = b = c = (0xDEADBEEF + len(key)) & 0xFFFFFFFF
    while len(key) > 12:
        words = np.frombuffer(key[:12], "<u4").tolist()
        a, b, c = ((x + w) & 0xFFFFFFFF for x, w in zip((a, b, c), words, strict=True))
        for k in (4, 6, 8, 16, 19, 4):
            a = ((a - c) & 0xFFFFFFFF) ^ rot(c, k)
            c = (c + b) & 0xFFFFFFFF
            a, b, c = b, c, a
        key = key[12:]
    if not key:
        return c
    words = np.frombuffer(key.ljust(12, b"\0"), "<u4").tolist()
    a, b, c = ((x + w) & 0xFFFFFFFF for x, w in zip((a, b, c), words, strict=True))
    for k in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - rot(b, k)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b


class Frames:
    """Read chunks whose checksum holds, decoded beside memory that may not be touched."""

    def __init__(self):
        self.kept = []

    def _guarded(self, content):
        """Return memory that ends where a page begins that may not be touched."""
        pages = -(-len(content) // mmap.PAGESIZE) + 1
        memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        end = pages * mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + end
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0
        memory[end - len(content) : end] = content
        return memoryview(memory)[end - len(content) : end]

    def trial(self, seed):
        import numcodecs

        from dcp_zarr.codecs import CompressionRules
        from dcp_zarr.errors import CorruptionError

        dice = random.Random(seed)
        itemsize = dice.choice((1, 2, 4, 8))
        values = np.random.default_rng(seed % 9).normal(size=4096 // itemsize)
        values = values.astype(f"<f{max(itemsize, 2)}").view(f"<u{itemsize}")
        option = dice.choice(
            ("fast", "small", None, numcodecs.Zstd(1), numcodecs.GZip(1), numcodecs.Blosc("zlib"))
        )
        filters = dice.random() < 0.3 and not isinstance(option, numcodecs.Zstd)
        rules = replace(CompressionRules.parse(option), filters=filters)
        codec = rules.codec("w", itemsize, dice.choice((values.nbytes, 1 << 20)))
        compressor = codec.compressor()
        frame = bytes(values.data if compressor is None else compressor.encode(values))
        changed = near_ends(dice, dice.choice(BYTES))(dice, frame)
        out = self._guarded(bytes(values.nbytes))
        try:
            codec.decode(self._guarded(changed), out)
        except CorruptionError:
            return f"refused {codec.name}"
        return f"decoded {codec.name}"


class Staged:
    """What ranks leave for the coordinator, and what they wrote, before it finishes."""

    def trial(self, seed):
        import torch

        import dcp_zarr
        from dcp_zarr.errors import DcpZarrError
        from tests import ranks

        dice = random.Random(seed)
        path = dice.choice(("x.zarr", "x.zarr.zip", "x.h5"))
        rows = torch.arange(50 * 40.0).reshape(50, 40)
        halves = ranks.parts(rows, (2, 1))
        states = [{"w": halves[0], "o": ({1},)}, {"w": halves[1], "v": rows[:3], "step": 3}]
        options = {"read_chunk_bytes": 1500, "sync_files": False, "thread_count": 1}
        options["statistics"] = dice.random() < 0.3
        writers = [dcp_zarr.storage_writer(path, **options) for _ in states]
        planners, plans, metadata = ranks.plan(writers, states)
        each = zip(writers, plans, planners, strict=True)
        results = [writer.write_data(plan, planner).wait() for writer, plan, planner in each]
        files = sorted(p for p in Path(f".{path}.partial").rglob("*") if p.is_file())
        file = dice.choice(files)
        file.write_bytes(dice.choice(BYTES)(dice, file.read_bytes()))
        try:
            writers[0].finish(metadata, results)
        except DcpZarrError as error:
            return f"not committed: {type(error).__name__}"
        expected = {"w": rows, "o": ({1},), "v": rows[:3], "step": 3}
        try:
            found = dcp_zarr.load(path, flat=True)
        except DcpZarrError as error:
            return f"committed, and {type(error).__name__}"
        return "committed" if equal(found, expected) else "other values were read"


KINDS = {
    "directory": Directory(),
    "zip": Zip(),
    "hdf5": HDF5(),
    "frames": Frames(),
    "staged": Staged(),
}


# What is done with them.


def read_all(path):
    """Look at everything; return what was loaded."""
    import dcp_zarr

    with dcp_zarr.open_checkpoint(path) as opened:
        repr(opened), str(opened.tree()), opened.totals()
        damage = opened.verify()
        opened.stats(stored=True)
        for tensor in opened.values():
            np.asarray(tensor)
        repr(opened.metadata())
        found = {}
        for name in SAFE:
            found |= opened.select(name).load(flat=True)
    return found, damage


def equal(found, expected):
    import torch

    return found.keys() == expected.keys() and all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in expected.items()
    )


def one(kind, path, seed, expected):
    """Change a checkpoint and read it; return what is wrong, or a word for what came of it."""
    from dcp_zarr.errors import DcpZarrError

    dice = random.Random(seed)
    exact = dice.random() < 0.5
    (kind.raw if exact else kind.schema)(dice)
    watched.clear()
    watched["folder"] = os.getcwd()  # noqa: PTH109
    try:
        found, damage = read_all(path)
        came = "read" if not damage else "read, and damage told"
        if exact and not equal(found, expected):
            return "other values were read"
    except DcpZarrError as error:
        came = type(error).__name__
        cause = error
        while cause := cause.__cause__:
            if isinstance(cause, MemoryError):
                return f"too much memory: {error}"
    except UserWarning as warning:
        came = f"warned: {str(warning)[-30:]}"
    finally:
        found_out = watched.pop("violations", [])
        watched.clear()
    return f"violation: {found_out}" if found_out else came


watched: dict = {}


def watch(event, args):
    """Note what no reading may do."""
    if "folder" not in watched:
        return
    if event in ("os.mkdir", "os.system", "subprocess.Popen", "os.remove", "os.rename"):
        watched.setdefault("violations", []).append((event, str(args)[:100]))
    elif event == "open" and isinstance(args[0], (str, bytes)):
        path, flags = os.fsdecode(args[0]), args[2] or 0
        inside = path.startswith(watched["folder"]) or not path.startswith("/")
        allowed = inside or path.startswith((sys.prefix, sys.base_prefix, "/proc/self", REPOSITORY))
        if ".." in path.split("/") or not allowed or flags & (os.O_WRONLY | os.O_RDWR):
            watched.setdefault("violations", []).append((event, str(args)[:100]))


REPOSITORY = str(Path(__file__).parents[1])


def changes_of(kind):
    """Make checkpoints of a kind; return what changes and reads one of them."""
    kept = {}
    for compression in ("fast", "small", None):
        save(kind.path, compression)
        Path("kept").mkdir(exist_ok=True)
        kept[compression] = Path(kind.path).rename(f"kept/{compression}-{kind.path}")
    expected = read_all(kept["fast"])[0]
    assert all(equal(read_all(at)[0], expected) for at in kept.values())

    def trial(seed):
        where = kept[random.Random(-seed - 1).choice(list(kept))]
        if Path(kind.path).is_dir():
            shutil.rmtree(kind.path)
        else:
            Path(kind.path).unlink(missing_ok=True)
        (shutil.copytree if where.is_dir() else shutil.copy)(where, kind.path)
        return one(kind, kind.path, seed, expected)

    return trial


def child(name, first, last, noted):
    """Try the changes of seeds from `first` on; note each before it is tried."""
    import torch

    import dcp_zarr.api

    assert dcp_zarr.api  # before the limits
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    kind = KINDS[name]
    trial = kind.trial if hasattr(kind, "trial") else changes_of(kind)
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    sys.addaudithook(watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts: Counter = Counter()
    with open(noted, "a", buffering=1) as notes:
        for seed in range(first, last):
            print("try", seed, file=notes)
            signal.alarm(SECONDS)
            try:
                came = trial(seed)
            except BaseException:  # noqa: BLE001
                came = "violation: " + traceback.format_exc()[-1500:]
            signal.alarm(0)
            if Path("PWNED").exists():
                came = "violation: a pickle ran"
            if came.startswith(("violation", "other values", "too much")):
                print("bad", seed, json.dumps(came), file=notes)
            counts[came] += 1
    print(json.dumps(counts))


def run(name, first, count):
    """Return the number of changes tried, how they came out, and violations by seed."""
    counts: Counter = Counter()
    bad: dict = {}
    seed = first
    while seed < first + count:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            command = [sys.executable, "-m", "tests.fuzz", "child", name, str(seed)]
            done = subprocess.run(
                [*command, str(first + count), "notes"], cwd=folder, capture_output=True, text=True,
                env={**os.environ, "PYTHONPATH": REPOSITORY, "MALLOC_ARENA_MAX": "2"}, check=False,
            )  # fmt: skip
            notes = Path(folder, "notes").read_text().splitlines()
        bad |= {int(n.split()[1]): n.split(maxsplit=2)[2] for n in notes if n.startswith("bad")}
        if done.returncode == 0:
            counts.update(json.loads(done.stdout.splitlines()[-1]))
            break
        seed = int(next(n for n in reversed(notes) if n.startswith("try")).split()[1])
        bad[seed] = f"died with {done.returncode}: {done.stderr[-1500:]}"
        seed += 1
    return counts, bad


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        sys.exit(0)
    found, wrong = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    for came, times in found.most_common():
        print(f"{times:8} {came[:100]}")
    for seed, what in wrong.items():
        print("SEED", seed, what.replace("\\n", "\n")[-900:])
    print(f"{sys.argv[1]}: {sys.argv[3]} changes, {len(wrong)} violations")
    sys.exit(bool(wrong))
