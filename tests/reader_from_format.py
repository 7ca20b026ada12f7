"""Reads a checkpoint by docs/format.md alone: json, numpy and numcodecs; prints what it found."""

import hashlib
import json
import sys
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
from numcodecs.blosc import Blosc

root = Path(sys.argv[1])
schema = json.loads((root / "zarr.json").read_bytes())["attributes"]["dcp_zarr"]
unsigned = {key: value for key, value in schema.items() if key != "digest"}
canonical = json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()
assert hashlib.sha256(canonical).hexdigest() == schema["digest"]
assert schema["format_version"] == 1


def regions(shape, tiling):
    if "offsets" in tiling:
        return [list(pair) for pair in zip(tiling["offsets"], tiling["sizes"], strict=True)]
    found = []
    for position in product(*map(range, tiling["count"])):
        steps = zip(position, tiling["step"], shape, strict=True)
        offsets = [min(p * step, n) for p, step, n in steps]
        limits = zip(tiling["step"], shape, offsets, strict=True)
        found.append([offsets, [min(step, n - offset) for step, n, offset in limits]])
    return found


def read(entry, dtype, codecs):
    document = (root / entry["path"] / "zarr.json").read_bytes()
    assert hashlib.sha256(document).hexdigest() == entry["document_sha256"]
    shape, reads, writes = entry["shape"], entry["read_chunk_shape"], entry["write_chunk_shape"]
    per_object = [w // r for w, r in zip(writes, reads, strict=True)]
    counts = [-(-n // r) for n, r in zip(shape, reads, strict=True)]
    values = np.empty([c * r for c, r in zip(counts, reads, strict=True)], dtype)
    for at in product(*map(range, counts)):
        write = [a // n for a, n in zip(at, per_object, strict=True)]
        stored = (root / entry["path"] / ".".join(["c", *map(str, write)])).read_bytes()
        if reads != writes:
            size = 16 * prod(per_object)
            index = np.frombuffer(stored[-size - 4 : -4], "<u8").reshape(*per_object, 2)
            offset, size = index[tuple(a % n for a, n in zip(at, per_object, strict=True))].tolist()
            stored = stored[offset : offset + size]
        raw = Blosc().decode(stored[:-4]) if codecs[0]["name"] == "blosc" else stored[:-4]
        box = tuple(slice(a * r, a * r + r) for a, r in zip(at, reads, strict=True))
        values[box] = np.frombuffer(raw, dtype).reshape(reads)
    return values[tuple(slice(0, n) for n in shape)]


entries = {entry["fqn"]: entry for entry in schema["entries"]}
found = {key: schema[key] for key in ("planner_data", "storage_meta")}
found["entries"] = dict.fromkeys(entries, "object")
for fqn, e in entries.items():
    if "torch_dtype" in e:
        tiles = regions(e["shape"], e["tiling"])
        found["entries"][fqn] = [e["shape"], e["torch_dtype"], tiles, e["properties"]]
tensor = entries[sys.argv[2]]
found["values"] = read(tensor, sys.argv[3], schema["codecs"][tensor["codec"]]).tolist()
print(json.dumps(found))
