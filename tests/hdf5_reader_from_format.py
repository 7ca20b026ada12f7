"""Reads an HDF5 checkpoint by docs/format.md: h5py for what it describes, numcodecs for values."""

import hashlib
import json
import sys
from itertools import product
from math import prod

import h5py
import numpy as np
from crc32c import crc32c
from numcodecs.blosc import Blosc
from numcodecs.shuffle import Shuffle
from numcodecs.zlib import Zlib

path, fqn, dtype = sys.argv[1:]
file = h5py.File(path)
assert json.loads(file.attrs["dcp_zarr"])["format_version"] == 1
schema = json.loads(file["~_schema"][()])
unsigned = {key: value for key, value in schema.items() if key != "digest"}
canonical = json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()
assert hashlib.sha256(canonical).hexdigest() == schema["digest"]
table = file["~_read_chunks"]
claims = json.loads(table.attrs["dcp_zarr"])
assert hashlib.sha256(table[()].tobytes()).hexdigest() == claims["sha256"]
assert table.id.get_offset() == claims["offset"]

rows, start = {}, 0
for entry in schema["entries"]:
    array = schema["objects_array"] if "offset" in entry else entry
    if "path" in array and array["path"] not in rows:
        pairs = zip(array["shape"], array["read_chunk_shape"], strict=True)
        end = start + prod(-(-n // r) for n, r in pairs)
        rows[array["path"]] = table[start:end].tolist()
        start = end
assert start == len(table)


def decoded(stored, codecs, nbytes):
    names = [codec["name"] for codec in codecs]
    if names[0] == "blosc":
        return Blosc().decode(stored)
    if "numcodecs.zlib" not in names or len(stored) == nbytes:
        return stored
    values = Zlib().decode(stored)
    if names[0] == "numcodecs.shuffle":
        return Shuffle(codecs[0]["configuration"]["elementsize"]).decode(values)
    return values


entry = next(entry for entry in schema["entries"] if entry["fqn"] == fqn)
found = file[entry["path"]]
assert hashlib.sha256(found.attrs["dcp_zarr"]).hexdigest() == entry["document_sha256"]
shape, reads = entry["shape"], entry["read_chunk_shape"]
counts = [-(-n // r) for n, r in zip(shape, reads, strict=True)]
values = np.empty([c * r for c, r in zip(counts, reads, strict=True)], dtype)
with open(path, "rb") as raw:
    for at, row in zip(product(*map(range, counts)), rows[entry["path"]], strict=True):
        raw.seek(row[0])
        stored = raw.read(row[1])
        assert crc32c(stored) == row[2]
        content = decoded(stored, schema["codecs"][entry["codec"]], values.itemsize * prod(reads))
        box = tuple(slice(a * r, a * r + r) for a, r in zip(at, reads, strict=True))
        values[box] = np.frombuffer(content, dtype).reshape(reads)
values = values[tuple(slice(0, n) for n in shape)]
if not any("blosc" in codec["name"] for codec in schema["codecs"][entry["codec"]]):
    assert np.array_equal(found[()], values)
print(json.dumps(values.tolist()))
