"""Whether every stored byte of a checkpoint is the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_zarr import engine
from dcp_zarr.region import Region, coordinates
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    from dcp_zarr.container import Source


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a checkpoint that is not as it was saved."""

    fqn: str | None
    """The tensor whose values are concerned; None for a document."""
    region: Region | None
    """Where in that tensor."""
    message: str
    """What is wrong."""

    def __str__(self) -> str:
        """Describe the damage in a line."""
        return self.message if self.fqn is None else f"{self.fqn} {self.region}: {self.message}"


def damage(source: Source) -> Iterator[Damage]:
    """Check every document, index and read chunk; yield what is lost or changed."""
    for text in source.damaged_documents():
        yield Damage(None, None, text)
    if source.schema.is_foreign:
        return
    jobs = [
        engine.CheckJob(array, write_chunk)
        for array, _, _ in source.schema.arrays()
        for write_chunk in coordinates(array.write_grid.touched(Region.whole(array.shape)))
    ]
    for job, error in engine.check(jobs, source, Limits.of(None)):
        region = job.array.write_grid.box(job.write_chunk)
        yield Damage(job.array.fqn, region, str(error))
