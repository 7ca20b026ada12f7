"""What the values of a save come to: each rank stages its sums, and the coordinator joins them.

A rank's staging file ``sums`` holds a record for each of its write items that is a part of a
tensor, in order, and their crc32c. Cut read chunks are in no rank's sums: the coordinator sums them
up when it puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr.codecs import CHECKSUM_BYTES, checksum
from dcp_zarr.pieces import check_staged
from dcp_zarr.value_sums import RECORD, SummedValues, ValueSums, join

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_zarr.container import Sink, Target

_SUMS = "sums"


def stage_sums(sink: Sink, sums: Sequence[ValueSums]) -> None:
    """Write a rank's sums, one for each part of a tensor, into its staging file."""
    staged = np.array(sums, RECORD).tobytes()
    sink.stage(_SUMS, 0, [staged, checksum(staged)])


def joined_sums(
    target: Target, ranks: Sequence[Sequence[str]], cut: Iterable[tuple[str, SummedValues]]
) -> dict[str, ValueSums]:
    """Return the sums of each tensor by its FQN. Coordinator only.

    Parameters
    ----------
    target
        Where the ranks staged theirs.
    ranks
        For each rank the FQNs of the parts that it wrote, in order.
    cut
        Cut read chunks, which the coordinator put together, by FQN.

    Raises
    ------
    SaveError
        If a rank's sums are not there as it wrote them.
    """
    numbers: dict[str, int] = {}
    groups: list[int] = []
    parts: list[NDArray[Any]] = []
    for rank, of_rank in enumerate(ranks):
        groups += [numbers.setdefault(fqn, len(numbers)) for fqn in of_rank]
        if of_rank:
            nbytes = len(of_rank) * RECORD.itemsize
            staged = target.read_staged(rank, _SUMS, 0, nbytes + CHECKSUM_BYTES)
            check_staged(staged[:nbytes], staged[nbytes:], rank, target)
            parts.append(np.frombuffer(staged, RECORD, len(of_rank)))
    for fqn, summed in cut:
        groups.append(numbers[fqn])
        parts.append(np.array([summed.sums()], RECORD))
    if not groups:
        return {}
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(np.array(groups)[order], np.arange(len(numbers)))
    whole = join(np.concatenate(parts)[order], starts.tolist())
    return {fqn: ValueSums(*sums) for fqn, sums in zip(numbers, whole.tolist(), strict=True)}
