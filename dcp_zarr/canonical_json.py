"""Values as JSON that says exactly the same: digests, objects and tilings."""

from __future__ import annotations

import hashlib
import json
from math import isfinite, prod
from operator import ge
from typing import Any

from dcp_zarr.region import Region, Shape, Tiling

Json = Any

_MAX_JSON_DEPTH = 32


def canonical(value: Json) -> bytes:
    """Return a JSON value as bytes: sorted keys, no white space, ASCII.

    Raises
    ------
    ValueError
        If the value holds NaN or an infinity, which strict JSON has no words for.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Json) -> str:
    """Return the SHA-256 of a JSON value in canonical form, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def json_text(value: Json) -> bytes | None:
    """Return an object as JSON, or None where JSON does not hold it exactly.

    Held exactly are None, booleans, integers of 64 bits, finite floats, text, and lists and
    dictionaries of these with text as keys; of these types themselves, and no list or dictionary
    in two places.

    Examples
    --------
    >>> json_text({"lr": 0.1, "betas": [0.9, 0.95]})
    b'{"lr":0.1,"betas":[0.9,0.95]}'
    >>> json_text((1, 2)) is None, json_text({1: 2}) is None, json_text(float("nan")) is None
    (True, True, True)
    """
    if not _is_json(value, set(), depth=0):
        return None
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _is_json(value: Json, seen: set[int], depth: int) -> bool:
    kind = type(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return isfinite(value)
    if kind is str:
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if kind not in (list, dict) or id(value) in seen or depth > _MAX_JSON_DEPTH:
        return False
    seen.add(id(value))
    if kind is dict and not all(type(key) is str and _is_json(key, seen, depth) for key in value):
        return False
    inner = value.values() if kind is dict else value
    return all(_is_json(item, seen, depth + 1) for item in inner)


def tiling_to_json(tiling: Tiling) -> Json:
    """Describe regions compactly: a step and a count on each axis, or a list where no grid.

    Examples
    --------
    >>> halves = [Region((0, 0), (5, 4)), Region((5, 0), (5, 4))]
    >>> tiling_to_json(Tiling.of((10, 4), halves))
    {'step': [5, 4], 'count': [2, 1]}
    """
    if tiling.grid is None:
        return {"offsets": tiling.offsets.tolist(), "sizes": tiling.sizes.tolist()}
    step, count = tiling.grid
    return {"step": list(step), "count": list(count)}


def tiling_from_json(shape: Shape, value: Json) -> Tiling:
    """Read what `tiling_to_json` wrote."""
    if "step" in value:
        if prod(value["count"]) == 1 and all(map(ge, value["step"], shape)):
            return Tiling.whole(shape)
        return Tiling.of_grid(shape, tuple(value["step"]), tuple(value["count"]))
    pairs = zip(value["offsets"], value["sizes"], strict=True)
    return Tiling.of(shape, [Region(tuple(o), tuple(s)) for o, s in pairs])
