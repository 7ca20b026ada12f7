"""Fully qualified names (FQNs), their paths in a container, and patterns that select them.

An FQN's segments, split at its dots, become nested groups: ``model.layers.0`` lies at
``model/layers/0``. Each segment is escaped so that any text is a legal name for Zarr, HDF5 and
every file system: letters, digits, ``_`` and ``-`` stand for themselves, every other UTF-8 byte is
``~`` and two hex digits, and an empty segment is ``~``. Names that begin with ``~_`` are ours:

==================  ====================================================================
``~_value``         entry whose FQN is also a prefix of another's
``~_objects``       the array that holds small objects
``~_schema``        in an HDF5 file, the schema
``~_read_chunks``   in an HDF5 file, where read chunks lie, and their checksums
``~_long``          group of entries whose path would be too long or too deep
==================  ====================================================================
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from dcp_zarr.errors import OptionError, TensorNotFoundError

OBJECTS_PATH = "~_objects"
"""Path of the array that holds small objects."""

_VALUE = "~_value"
_LONG = "~_long"
_MAX_SEGMENT_BYTES = 200
_MAX_PATH_BYTES = 1000
_MAX_DEPTH = 32
_MAX_CANDIDATES = 1000
_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"


def escape(segment: str) -> str:
    """Return a legal, unique name for one segment of an FQN.

    Examples
    --------
    >>> escape("up_proj"), escape("a/b"), escape(""), escape("__x")
    ('up_proj', 'a~2fb', '~', '~5f_x')
    """
    if not segment:
        return "~"
    escaped = re.sub(r"[^A-Za-z0-9_-]", lambda match: _hex(match[0]), segment)
    return _hex("_") + escaped[1:] if escaped.startswith("__") else escaped


def _hex(text: str) -> str:
    return "".join(f"~{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))


def assign_paths(fqns: Iterable[str]) -> dict[str, str]:
    """Give each FQN its path in the container.

    The result depends on the set of names only. Two paths never differ by letter case alone, and
    none leads through another.

    Examples
    --------
    >>> assign_paths(["w", "w.scale", "W"])
    {'W': 'W', 'w': '~77/~_value', 'w.scale': '~77/scale'}
    """
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    ordered = sorted(set(fqns))
    for fqn in ordered:
        node = tree
        for segment in fqn.split("."):
            node = node.setdefault(segment, {})
    paths = {}
    siblings: dict[int, dict[str, str]] = {}
    for fqn in ordered:
        node, names = tree, []
        for segment in fqn.split("."):
            if id(node) not in siblings:
                siblings[id(node)] = _sibling_names(node)
            names.append(siblings[id(node)][segment])
            node = node[segment]
        path = "/".join([*names, _VALUE] if node else names)
        paths[fqn] = _shortened(fqn, path)
    return paths


def _sibling_names(segments: Iterable[str]) -> dict[str, str]:
    """Escape the segments of one group so that they differ in more than letter case."""
    names, taken = {}, set()
    for segment in segments:
        name = escape(segment)
        if name.lower() in taken:
            name = _hex(segment)
        taken.add(name.lower())
        names[segment] = name
    return names


def _shortened(fqn: str, path: str) -> str:
    """Return `path`, or a path made of a digest where a file system could refuse it."""
    names = path.split("/")
    longest = max(map(len, names))
    if longest <= _MAX_SEGMENT_BYTES and len(path) <= _MAX_PATH_BYTES and len(names) <= _MAX_DEPTH:
        return path
    digest = hashlib.sha256(fqn.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", fqn)[-80:].lower()
    return f"{_LONG}/{digest}-{readable}"


def parents(paths: Iterable[str]) -> list[str]:
    """Return the paths of all groups above the given arrays, the root left out, sorted.

    Examples
    --------
    >>> parents(["a/b/c", "a/d"])
    ['a', 'a/b']
    """
    found: set[str] = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in found:
                break
            found.add(path)
    return sorted(found)


def pattern_matches(pattern: str, fqns: Iterable[str]) -> Iterator[str]:
    """Yield the names that a pattern selects, in their order.

    A name selects its entry and all below it; ``*`` stands for text within a segment, ``**`` for
    text across segments, and ``[0-3,7]`` for a number, as trees write those of layers. The empty
    pattern selects everything.

    Raises
    ------
    OptionError
        If it is no string.

    Examples
    --------
    >>> names = ["model.layers.0.bias", "model.layers.10.bias", "optim.lr"]
    >>> list(pattern_matches("model.layers.*.bias", names))
    ['model.layers.0.bias', 'model.layers.10.bias']
    >>> list(pattern_matches("**bias", names)), list(pattern_matches("optim", names))
    (['model.layers.0.bias', 'model.layers.10.bias'], ['optim.lr'])
    >>> list(pattern_matches("model.layers.[0-3]", names))
    ['model.layers.0.bias']
    """
    if not isinstance(pattern, str):
        raise OptionError(
            f"{pattern!r} is no pattern: give one string, in which * stands for text, and [0-3] "
            "for numbers."
        )
    known = list(fqns)
    parts = re.split(rf"(\*\*|\*|{_NUMBERS})", pattern)
    body = "".join(_expression(part, known) for part in parts)
    expression = re.compile(rf"{body}(?:\..*)?" if pattern else ".*", re.DOTALL)
    prefix = pattern + "."
    for fqn in known:
        if fqn == pattern or fqn.startswith(prefix) or expression.fullmatch(fqn):
            yield fqn


def _expression(part: str, fqns: Iterable[str]) -> str:
    """Return the expression for a part of a pattern; brackets of numbers may be a name too."""
    if part in ("*", "**"):
        return r".*" if part == "**" else r"[^.]*"
    if not re.fullmatch(_NUMBERS, part):
        return re.escape(part)
    runs = [[int(end) for end in run.split("-")] for run in part[1:-1].split(",")]
    there = {number for fqn in fqns for number in re.findall(r"\d{1,9}", fqn)}
    wanted = "|".join(n for n in there if any(run[0] <= int(n) <= run[-1] for run in runs))
    return rf"(?:{re.escape(part)}|(?<!\d)(?:{wanted})(?!\d))" if wanted else re.escape(part)


def select(pattern: str, fqns: Sequence[str], *, where: str) -> list[str]:
    """Return the names that a pattern selects.

    Raises
    ------
    TensorNotFoundError
        If it selects none; the message gives names that are near.
    """
    if found := list(pattern_matches(pattern, fqns)):
        return found
    if not pattern:
        return []
    raise not_found(pattern, fqns, where=where)


def not_found(fqn: str, fqns: Iterable[str], *, where: str) -> TensorNotFoundError:
    """Make the error for a name that is not there: what is below it, or what is near it."""
    known = list(fqns)
    below = [name for name in known if name.startswith(fqn + ".")]
    if below:
        message = (
            f"{fqn!r} in {where} is no entry, but holds {len(below)}, such as {below[0]!r}. "
            f"select({fqn!r}) gives them, and load(path, {fqn!r}) loads them."
        )
        return TensorNotFoundError(message, fqn=fqn)
    groups = {name.rsplit(".", 1)[0] for name in known[:_MAX_CANDIDATES]}
    depth = fqn.count(".") + 1
    groups |= {".".join(name.split(".")[:depth]) for name in known[:_MAX_CANDIDATES]}
    close = _close(fqn, [*known, *sorted(groups)], 3)
    hint = f" Near it: {', '.join(map(repr, close))}." if close else ""
    return TensorNotFoundError(f"Nothing in {where} is named {fqn!r}.{hint}", fqn=fqn)


def near(fqn: str, fqns: Iterable[str]) -> str:
    """Return a hint at the name nearest to one that is not there, or nothing.

    Examples
    --------
    >>> near("model.wieght", ["model.weight", "step"])
    " (near: 'model.weight')"
    """
    close = _close(fqn, fqns, 1)
    return f" (near: {close[0]!r})" if close else ""


def _close(fqn: str, fqns: Iterable[str], count: int) -> list[str]:
    """Return the nearest names of about that length; to compare all may take seconds."""
    nearest = sorted(dict.fromkeys(fqns), key=lambda name: abs(len(name) - len(fqn)))
    return get_close_matches(fqn, nearest[:_MAX_CANDIDATES], n=count, cutoff=0.6)
