"""A tensor that is read when it is indexed. numpy is enough; torch comes in on request."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp_zarr import display, engine
from dcp_zarr.errors import OptionError
from dcp_zarr.histogram import Histogram, histogram
from dcp_zarr.pictures import grids
from dcp_zarr.pooling import pooled
from dcp_zarr.region import Region
from dcp_zarr.spectrum import Spectrum, spectrum
from dcp_zarr.tasks import Limits

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from dcp_zarr.container import Source
    from dcp_zarr.pictures.picture import Picture
    from dcp_zarr.region import Shape
    from dcp_zarr.schema import TensorEntry

AxisIndex = int | slice | EllipsisType | None
Index = AxisIndex | tuple[AxisIndex, ...]


class LazyTensor:
    """A tensor in a checkpoint. Indexing reads the smallest box that holds what is asked for.

    ``tensor[...]`` gives a `torch.Tensor`, ``np.asarray(tensor)`` a numpy array without torch.
    """

    def __init__(self, entry: TensorEntry, source: Source) -> None:
        self._entry = entry
        self._source = source

    @property
    def fqn(self) -> str:
        """Fully qualified name."""
        return self._entry.fqn

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self._entry.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def torch_dtype(self) -> str:
        """Name of the torch dtype, without ``torch.``."""
        return self._entry.dtype.torch_name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the numpy array; bfloat16 and float8 are those of ml_dtypes."""
        return self._entry.dtype.stored

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes."""
        return self._entry.array.nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes as stored."""
        return self._entry.stored_nbytes

    @property
    def regions(self) -> list[Region]:
        """The regions in which the ranks saved it."""
        return list(self._entry.tiling)

    def __len__(self) -> int:
        """Return the length of the first axis."""
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part of the tensor.

        Parameters
        ----------
        index
            Integers, slices of any step, ``...`` and None, as in numpy.
        """
        from dcp_zarr import tensors  # noqa: PLC0415

        return tensors.from_bits(self._bits(index), self.torch_dtype)

    def numpy(self, index: Index = ...) -> NDArray[Any]:
        """Read a part of the tensor, without torch; complex32 gains a last axis of 2."""
        return self._entry.dtype.values(self._bits(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001
        """Read the whole tensor."""
        if copy is False:
            raise ValueError("A tensor in a checkpoint cannot be seen without a copy.")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def _bits(self, index: Index) -> NDArray[Any]:
        region, rest = _bounding_region(index, self.shape, self.fqn)
        out = np.empty(region.sizes, self._entry.dtype.bits)
        job = engine.ReadJob(self._entry.array, self._entry.codec, region, out)
        list(engine.read([job], self._source, Limits.of(None)))
        whole = all(isinstance(part, slice) and part.step in (None, 1) for part in rest)
        return out if whole else np.array(out[rest], order="C")

    def histogram(self, bins: int = 64, *, thread_count: int | None = None) -> Histogram:
        """Return how many values lie in each of some equal bins; read in bounded memory.

        Parameters
        ----------
        bins
            How many, from the least finite value to the largest.
        thread_count
            Worker threads; by default this process' share of the cores.

        Raises
        ------
        OptionError
            If `bins` is no whole number from 1 to 65,536.
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"w": torch.tensor([0.0, 1.0, 1.5, 4.0])}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr")["w"].histogram(bins=4)
        Histogram 'w': 4 finite values from 0 to 4 |▄█ ▄|, 0 NaN, 0 infinite
        """
        return histogram(self._entry, self._source, bins, Limits.of(thread_count))

    def spectrum(self, *, thread_count: int | None = None) -> Spectrum:
        """Return the singular values of the first axis against all others.

        They come from the Gram matrix in float64; those below 1e-8 of the largest are noise.
        Memory is some times the smaller side squared: about 2 GiB for a side of 8,192.

        Raises
        ------
        OptionError
            If the tensor has fewer than two axes, a smaller side beyond 8,192, or values that are
            not finite.
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"w": torch.tensor([[3.0, 0, 0], [0, 0, 4]])}, "step-1.zarr")
        >>> found = dcp_zarr.open_checkpoint("step-1.zarr")["w"].spectrum()
        >>> found.singular_values, found.norm, found.stable_rank
        ((4.0, 3.0), 5.0, 1.5625)
        """
        return spectrum(self._entry, self._source, Limits.of(thread_count))

    def heat_map(self, *, thread_count: int | None = None) -> Picture:
        """Draw the largest absolute value of each part, in 256 x 256 cells at most.

        The first axis is rows, all others are columns together. What is not finite is red. All is
        read, in bounded memory.

        Raises
        ------
        OptionError
            If the tensor has no elements.
        CorruptionError
            If stored bytes are lost or changed.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"w": torch.randn(600, 400)}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr")["w"].heat_map().save("w.svg")
        """
        cells = pooled(self._entry, self._source, Limits.of(thread_count))
        if not cells.size:
            raise OptionError(f"Tensor {self.fqn!r} of shape {self.shape} has no values to draw.")
        return grids.heat_map(cells, self.shape, f"{self.fqn}: largest absolute values")

    def region_map(self) -> Picture:
        """Draw the regions in which the ranks saved the tensor, numbered in their order.

        Examples
        --------
        >>> import dcp_zarr, torch
        >>> _ = dcp_zarr.save({"w": torch.randn(6, 4)}, "step-1.zarr")
        >>> dcp_zarr.open_checkpoint("step-1.zarr")["w"].region_map().save("regions.svg")
        """
        boxes = [(region.offsets, region.sizes) for region in self.regions]
        return grids.region_map(boxes, self.shape, f"{self.fqn}: regions")

    def row(self) -> display.Row:
        """Return what is shown of the tensor."""
        codec = dict(self._entry.codec.configuration).get("cname", self._entry.codec.name)
        return display.Row(
            self.fqn, self.torch_dtype, self.shape, self.nbytes, self.stored_nbytes, codec=codec
        )

    def __repr__(self) -> str:
        """Describe the tensor; nothing is read."""
        row = self.row()
        return (
            f"LazyTensor {self.fqn!r} {row.summary()}, {display.size(self.stored_nbytes)} "
            f"stored with {row.codec}; index it to read: [...] reads all"
        )


def _bounding_region(index: Index, shape: Shape, fqn: str) -> tuple[Region, tuple[AxisIndex, ...]]:
    """Return the smallest region that holds an index, and the index within that region."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if not _is_plain(part):
            raise OptionError(
                f"Tensor {fqn!r} in a checkpoint takes integers, slices, ... and None, not "
                f"{part!r:.80}. Read it first: tensor[...][index].",
                fqn=fqn,
            )
    axes_used = sum(part is not None and part is not ... for part in parts)
    if parts.count(...) > 1 or axes_used > len(shape):
        raise IndexError(
            f"{index!r} has too many indices or ellipses for tensor {fqn!r} of shape {shape}."
        )
    if ... not in parts:
        parts = (*parts, ...)
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[AxisIndex] = []
    for part in parts:
        if part is None:
            rest.append(None)
        elif part is ...:
            fill = shape[len(offsets) : len(offsets) + len(shape) - axes_used]
            offsets += [0] * len(fill)
            sizes += fill
            rest += [slice(None)] * len(fill)
        else:
            start, length, within = _bounding_axis(part, shape[len(offsets)], fqn)
            offsets.append(start)
            sizes.append(length)
            rest.append(within)
    return Region(tuple(offsets), tuple(sizes)), tuple(rest)


def _is_plain(part: object) -> bool:
    plain = part is None or part is ... or isinstance(part, (int, np.integer, slice))
    return plain and not isinstance(part, bool)


def _bounding_axis(part: AxisIndex, length: int, fqn: str) -> tuple[int, int, int | slice]:
    """Return start and length of the smallest range that holds an index, and the index in it."""
    if isinstance(part, slice):
        positions = range(*part.indices(length))
        if not positions:
            return 0, 0, slice(None)
        low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
        return low, high - low + 1, slice(None, None, positions.step)
    position = int(part)  # type: ignore[arg-type]
    if not -length <= position < length:
        raise IndexError(f"Index {position} is out of range for an axis of {length} of {fqn!r}.")
    return position % length, 1, 0
