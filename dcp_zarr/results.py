"""What the ranks of a save report, and whether it is what they were to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from dcp_zarr.errors import SaveError
from dcp_zarr.parts import Parts, RankParts, by_tensor
from dcp_zarr.placement import fingerprints, layout_fingerprint, path_fingerprint
from dcp_zarr.region import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.placement import Placement, TensorPlan
    from dcp_zarr.region import Tiling


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank reports as done."""

    parts: RankParts
    """The parts of tensors that it wrote."""
    stored_nbytes: NDArray[np.int64]
    """For each part, what of it was stored."""
    fingerprints: NDArray[np.uint64]
    """For each part, how the rank wrote it."""
    objects: Mapping[int, tuple[str, int]]
    """By the number of the write item, FQN and fingerprint of each object."""
    shared: frozenset[str] = frozenset()
    """FQNs of tensors that it wrote shares of."""

    @classmethod
    def nothing(cls) -> RankResult:
        """Return what a rank without write items reports."""
        return cls(RankParts.of([], [], []), np.empty(0, np.int64), np.empty(0, np.uint64), {})


def check_results(
    results: Sequence[RankResult],
    tensors: Mapping[str, TensorPlan],
    objects: Sequence[str],
    placement: Placement,
) -> dict[str, Parts]:
    """Return the parts of all tensors, in the order of their tilings.

    Parameters
    ----------
    results
        Of all ranks.
    tensors
        By FQN.
    objects
        FQNs of what is no tensor.
    placement
        Where everything was to go.

    Raises
    ------
    SaveError
        If anything is missing, is too much, or was written in another way.
    """
    found = by_tensor([result.parts for result in results])
    parts = {
        fqn: _in_order(fqn, plan.tiling, found.pop(fqn, None)) for fqn, plan in tensors.items()
    }
    done = {fqn for result in results for fqn, _ in result.objects.values()}
    for fqn in objects:
        if fqn not in done:
            raise SaveError(
                f"Object {fqn!r} was written by no rank: the save is given up.", fqn=fqn
            )
    for fqn, unknown in found.items():
        raise _outdated(int(unknown.ranks[0]), fqn)
    _check_fingerprints(results, placement, parts)
    return parts


def _in_order(fqn: str, tiling: Tiling, parts: Parts | None) -> Parts:
    """Return a tensor's parts in the order of its tiling; mostly they are."""
    if parts is not None:
        same = np.array_equal(parts.offsets, tiling.offsets)
        if same and np.array_equal(parts.sizes, tiling.sizes):
            return parts
    rows: dict[Region, list[int]] = defaultdict(list)
    if parts is not None:
        for row, box in enumerate(_regions(parts)):
            rows[box].append(row)
    order = []
    for region in tiling:
        if not rows[region]:
            raise SaveError(
                f"Tensor {fqn!r} {region} was written by no rank; the save is given up.",
                fqn=fqn,
                region=str(region),
            )
        order.append(rows[region].pop(0))
    assert parts is not None  # noqa: S101
    for row in chain.from_iterable(rows.values()):
        raise _outdated(int(parts.ranks[row]), fqn)
    columns = parts.offsets, parts.sizes, parts.ranks, parts.rows
    return Parts(*(column[order] for column in columns))


def _regions(parts: Parts) -> list[Region]:
    boxes = zip(parts.offsets.tolist(), parts.sizes.tolist(), strict=True)
    return [Region(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]


def _check_fingerprints(
    results: Sequence[RankResult], placement: Placement, parts: Mapping[str, Parts]
) -> None:
    """Raise unless the ranks wrote everything in the way that follows from the `Metadata`."""
    layouts = {fqn: layout_fingerprint(array) for fqn, array in placement.layouts.items()}
    counts = [len(result.parts.fqns) for result in results]
    slabs = placement.slab_rows(parts, counts)
    last: Sequence[str] = ()
    of_last = np.empty(0, np.uint64)
    for rank, (result, rows) in enumerate(zip(results, slabs, strict=True)):
        if result.parts.fqns != last:  # most ranks have parts of the same tensors
            last = result.parts.fqns
            of_last = np.array([layouts[fqn] for fqn in last], np.uint64)
        expected = fingerprints(result.parts, of_last, rows)
        for part in np.flatnonzero(expected != result.fingerprints).tolist():
            raise _outdated(rank, result.parts.fqns[part])
        for fqn, fingerprint in result.objects.values():
            if fingerprint != path_fingerprint(placement.paths.get(fqn, "")):
                raise _outdated(rank, fqn)


def _outdated(rank: int, fqn: str) -> SaveError:
    return SaveError(
        f"Rank {rank} wrote {fqn!r} by an outdated plan; the save is given up. Use "
        "DefaultSavePlanner(enable_plan_caching=False).",
        fqn=fqn,
        rank=rank,
    )
