"""torch tensors as arrays of bits, and back. Nothing below this module imports torch."""

from __future__ import annotations

import io
import pickle
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_zarr.containers.foreign.pickles import TorchName
from dcp_zarr.dtypes import PACKED, DType, dtype_of
from dcp_zarr.errors import CorruptionError, UnsafeObjectError, UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dcp_zarr.region import Region

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_alone() -> bool:
    """Say whether there is no process group: this process saves and loads alone."""
    return not (dist.is_available() and dist.is_initialized())


@lru_cache
def torch_name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the name of one of torch's constants, without ``torch.``."""
    return str(constant).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101
    return dtype


def stored_dtype(tensor: torch.Tensor, fqn: str) -> DType:
    """Return how a tensor is stored, or say why it cannot be.

    Raises
    ------
    UnsupportedTensorError
        For sparse, quantised, meta and wrapper tensors, and for storage that was freed.
    """
    reason = None
    if tensor.layout != torch.strided:
        reason = f"has layout {tensor.layout}; convert it with to_dense()"
    elif tensor.is_quantized:
        reason = "is quantised; store int_repr() and its scales instead"
    elif tensor.is_meta:
        reason = "is on the meta device and has no values; materialise it first"
    elif _wraps(tensor):
        kind = type(tensor).__name__
        reason = f"has type {kind}, whose values are not its own; store the tensors that it wraps"
    elif tensor.numel() and not tensor.untyped_storage().size():
        reason = "has no storage any more; save it before it is freed"
    if reason is not None:
        raise UnsupportedTensorError(f"Tensor {fqn!r} {reason}, or drop it.", fqn=fqn)
    return dtype_of(torch_name(tensor.dtype), fqn=fqn)


def _wraps(tensor: torch.Tensor) -> bool:
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches or is_traceable_wrapper_subclass(tensor)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """View a CPU tensor as an array of bits that shares its memory, whatever its strides.

    A tensor with a lazy conjugation or negation is resolved, which copies it.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    same_size = _SAME_SIZE.get(tensor.element_size())
    if same_size is None:
        return tensor.numpy()
    array = tensor.view(same_size).numpy()
    return array.view(f"u{tensor.element_size()}")


def values_of(tensor: torch.Tensor, region: Region) -> Callable[[Region], NDArray[Any]]:
    """Return a function that gives the bits of a region of the whole tensor.

    Parameters
    ----------
    tensor
        A rank's part of the whole tensor, on any device.
    region
        Where that part lies.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        array = bits(tensor)
        return lambda wanted: array[wanted.index(region.offsets)]

    def from_device(wanted: Region) -> NDArray[Any]:
        return bits(tensor[wanted.index(region.offsets)].contiguous().cpu())

    return from_device


def shares_elements(target: torch.Tensor) -> bool:
    """Say whether a target was expanded, so that a value would be written to several places."""
    pairs = zip(target.shape, target.stride(), strict=True)
    return target.layout == torch.strided and any(n > 1 and step == 0 for n, step in pairs)


def writes_in_place(target: torch.Tensor, dtype: DType) -> bool:
    """Say whether stored bits can be put into a target as they are."""
    return (
        target.device.type == "cpu"
        and target.layout == torch.strided
        and torch_name(target.dtype) == dtype.torch_name
        and not (target.is_conj() or target.is_neg())
    )


def from_bits(array: NDArray[Any], name: str) -> torch.Tensor:
    """Return a tensor of the dtype of that name that shares an array's memory."""
    dtype = torch_dtype(name)
    signed = f"i{array.itemsize}" if array.dtype.kind == "u" and array.itemsize > 1 else array.dtype
    tensor = torch.from_numpy(array.view(signed))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def widens(saved: torch.dtype, target: torch.dtype) -> bool:
    """Say whether every value of one dtype has an equal value in another.

    Examples
    --------
    >>> widens(torch.bfloat16, torch.float32), widens(torch.float32, torch.bfloat16)
    (True, False)
    >>> widens(torch.int32, torch.float32), widens(torch.bool, torch.int8)
    (False, True)
    """
    if saved == target:
        return True
    if {torch_name(saved), torch_name(target)} & set(PACKED):
        return False
    if target.is_complex:
        parts = {torch.complex32: torch.float16, torch.complex64: torch.float32}
        return widens(parts.get(saved, saved), parts.get(target, torch.float64))
    if saved.is_complex or target == torch.bool:
        return False
    if saved == torch.bool:
        return not torch_name(target).startswith("float8_e8")
    if target.is_floating_point:
        return _float_holds(torch.finfo(target), saved)
    if saved.is_floating_point:
        return False
    small, large = torch.iinfo(saved), torch.iinfo(target)
    return large.min <= small.min and small.max <= large.max


def _float_holds(target: torch.finfo, saved: torch.dtype) -> bool:
    if not saved.is_floating_point:
        return (
            target.eps <= 2.0 ** (1 - torch.iinfo(saved).bits)
            and target.max >= torch.iinfo(saved).max
        )
    source = torch.finfo(saved)
    return (
        target.eps <= source.eps
        and target.max >= source.max
        and target.smallest_normal <= source.smallest_normal
    )


def object_value(payload: bytes | memoryview, fqn: str, *, weights_only: bool = True) -> Any:  # noqa: ANN401
    """Return the object in what `torch.save` wrote.

    Parameters
    ----------
    payload
        The bytes.
    fqn
        Named in the error.
    weights_only
        Refuse whatever could run code.

    Raises
    ------
    UnsafeObjectError
        If `weights_only`, and the object is of a type that could run code.
    CorruptionError
        If `weights_only`, and it is not whole.
    """
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        summary = str(error).splitlines()[0][:200]
        found = re.search(r"WeightsUnpickler error: (.*?)(?:\. Please|$)", str(error), re.MULTILINE)
        raise UnsafeObjectError(
            f"Object {fqn!r} is not loaded, since unpickling it could run code: "
            f"{found[1] if found else summary}. If you trust the checkpoint: "
            "dcp_zarr.load(path, name, weights_only=False).",
            fqn=fqn,
        ) from error
    except Exception as error:  # what torch makes of changed bytes
        if not weights_only:
            raise  # perhaps of a class of the caller's
        raise CorruptionError(
            f"Object {fqn!r} is damaged: {error!r:.200} Restore the checkpoint from a copy.",
            fqn=fqn,
        ) from error


def object_payload(value: Any) -> bytes:  # noqa: ANN401
    """Return an object as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def restored(value: Any) -> Any:  # noqa: ANN401
    """Return a plain value of a file of ``torch.save``, with what of torch's it holds by name.

    Examples
    --------
    >>> restored({"dtype": TorchName("bfloat16"), "on": (TorchName("cuda:1"), 3)})
    {'dtype': torch.bfloat16, 'on': (device(type='cuda', index=1), 3)}
    """
    if type(value) is TorchName:
        found = getattr(torch, value, None)
        return found if isinstance(found, (torch.dtype, torch.layout)) else torch.device(value)
    if isinstance(value, dict):
        return type(value)((restored(key), restored(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(map(restored, value))
    return value
