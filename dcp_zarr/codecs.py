"""How read chunks are compressed, and the checksum of each.

Only core Zarr v3 codecs are written to Zarr stores: blosc, zstd, gzip and crc32c. In HDF5 files
they are filters, and gzip is HDF5's own: shuffle and deflate. numcodecs and ISA-L do the work and
release the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from isal.igzip_lib import IsalError

from dcp_zarr import frames, names, split_frames
from dcp_zarr.errors import CorruptionError, OptionError
from dcp_zarr.shuffle_zlib import ShuffleZlib

if TYPE_CHECKING:
    import numcodecs
    from numpy.typing import NDArray

CHECKSUM_BYTES = 4
_MAX_GZIP_LEVEL = 9
SHUFFLE_ZLIB = "shuffle_zlib"
"""Name of the codec that is HDF5's filters shuffle and deflate."""
SMALL_MIN_BYTES = 64 << 10
"""Below this size of a read chunk zstd takes too long for its gain, and `small` uses LZ4."""

_BLOSC_MAX_BYTES = 2**31 - 1 - 16  # its header counts
_BLOSC_BLOCK_BYTES = 1 << 20
_SHUFFLES = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}
"""What Zarr calls each number of numcodecs."""
_ALLOWED = "'fast', 'small', None, or numcodecs' Blosc, Zstd or GZip"

CompressionName = Literal["fast", "small"]
Compression: TypeAlias = "CompressionName | numcodecs.abc.Codec | None"
CompressionOption: TypeAlias = "Compression | Mapping[str, Compression]"


def checksum(stored: Any) -> bytes:  # noqa: ANN401
    """Return the crc32c (Castagnoli, RFC 3720) of a buffer, little endian."""
    from crc32c import crc32c  # noqa: PLC0415  takes long, and what only looks needs none

    return struct.pack("<I", crc32c(stored))


@dataclass(frozen=True, slots=True)
class Codec:
    """What stands between the bytes of a read chunk and its stored bytes, checksum aside."""

    name: str
    """Zarr v3 codec name: ``blosc``, ``zstd``, ``gzip``; or ``shuffle_zlib``, or ``none``."""
    configuration: tuple[tuple[str, Any], ...] = ()
    """Its Zarr v3 configuration; of ``shuffle_zlib``, ``level`` and ``elementsize``."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the Zarr v3 codecs that follow ``bytes``."""
        crc = {"name": "crc32c"}
        if self.name == "none":
            return [crc]
        configuration = dict(self.configuration)
        if self.name != SHUFFLE_ZLIB:
            return [{"name": self.name, "configuration": configuration}, crc]
        elementsize = configuration.pop("elementsize")
        deflate = {"name": "numcodecs.zlib", "configuration": configuration}
        if elementsize == 1:
            return [deflate, crc]
        shuffle = {"name": "numcodecs.shuffle", "configuration": {"elementsize": elementsize}}
        return [shuffle, deflate, crc]

    @classmethod
    def from_json(cls, codecs: Sequence[Mapping[str, Any]]) -> Codec:
        """Read what `to_json` wrote."""
        if len(codecs) == 1:
            return cls("none")
        *shuffle, deflate, _ = codecs
        if deflate["name"] == "numcodecs.zlib":
            elementsize = shuffle[0]["configuration"]["elementsize"] if shuffle else 1
            return shuffle_zlib(deflate["configuration"]["level"], elementsize)
        return cls(codecs[0]["name"], tuple(codecs[0]["configuration"].items()))

    def compressor(self) -> numcodecs.abc.Codec | None:
        """Return the numcodecs object that encodes and decodes; None where there is none."""
        return _compressor(self)

    def _make_compressor(self) -> numcodecs.abc.Codec | None:
        if self.name == "none":
            return None
        configuration = dict(self.configuration)
        if self.name == SHUFFLE_ZLIB:
            return ShuffleZlib(**configuration)
        import numcodecs  # noqa: PLC0415  takes long too

        if self.name == "blosc":
            shuffles = {text: number for number, text in _SHUFFLES.items()}
            blosc = numcodecs.Blosc(
                cname=configuration["cname"],
                clevel=configuration["clevel"],
                shuffle=shuffles[configuration["shuffle"]],
                blocksize=configuration["blocksize"],
            )
            return _SplitBlosc(blosc) if self == _small(configuration["typesize"]) else blosc
        if self.name == "zstd":
            return numcodecs.Zstd(level=configuration["level"])
        if self.name == "gzip":
            return numcodecs.GZip(level=configuration["level"])
        return None

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """Decode a read chunk into bytes of exactly its size.

        Raises
        ------
        CorruptionError
            If `stored` is not what this codec makes of that many bytes.
        """
        compressor = self.compressor()
        if compressor is None:
            frames.check_nbytes(len(stored), len(out))
            out[:] = stored
        elif self.name == "blosc":
            frames.check_blosc(stored, len(out))
            _decode(compressor.decode, stored, out)
        elif self.name == SHUFFLE_ZLIB:
            _decode(compressor.decode, stored, out)
        else:
            decode = frames.gzip_decoded if self.name == "gzip" else frames.zstd_decoded
            out[:] = _decode(decode, stored, len(out))

    def expected_nbytes(self, torch_name: str, nbytes: int) -> int:
        """Return what `nbytes` of trained weights are likely to take, two hundredths more."""
        if self.name == "none":
            return nbytes
        kind = dict(self.configuration).get("cname", self.name)
        parts = _PARTS.get(kind, _ZSTD_PARTS)
        return int(1.02 * parts.get(torch_name, 1) * nbytes)

    def largest_nbytes(self, nbytes: int) -> int:
        """Return the most bytes that a read chunk of `nbytes` can take, its checksum included."""
        return CHECKSUM_BYTES + nbytes + (0 if self.name == "none" else nbytes // 64 + 1024)


# Of normally distributed weights, measured; as seen in trained ones.
_LZ4_PARTS = {
    "bfloat16": 0.756,
    "float16": 0.94,
    "float32": 0.878,
    "float8_e4m3fn": 0.754,
    "float8_e5m2": 0.88,
}
_ZLIB_PARTS = {
    "bfloat16": 0.712,
    "float16": 0.846,
    "float32": 0.857,
    "float8_e4m3fn": 0.671,
    "float8_e5m2": 0.691,
}
_ZSTD_PARTS = {
    "bfloat16": 0.67,
    "float16": 0.844,
    "float32": 0.835,
    "float8_e4m3fn": 0.67,
    "float8_e5m2": 0.689,
}
_PARTS = {
    **dict.fromkeys(("lz4", "lz4hc", "blosclz", "snappy"), _LZ4_PARTS),
    SHUFFLE_ZLIB: _ZLIB_PARTS,
}


class _SplitBlosc:
    """Blosc's zstd and byte shuffle, encoded by `split_frames`."""

    def __init__(self, blosc: numcodecs.abc.Codec) -> None:
        self._blosc = blosc
        self.decode = blosc.decode

    def encode(self, buf: NDArray[Any]) -> Any:  # noqa: ANN401
        if buf.nbytes < split_frames.MIN_BYTES:
            return self._blosc.encode(buf)
        return split_frames.encode(buf)


@lru_cache(maxsize=64)
def _compressor(codec: Codec) -> numcodecs.abc.Codec | None:
    return codec._make_compressor()


def _decode(decode: Callable[..., Any], stored: memoryview, *given: Any) -> Any:  # noqa: ANN401
    try:
        return decode(stored, *given)
    except (RuntimeError, ValueError, OSError, EOFError, IsalError) as error:  # type: ignore[misc]
        raise CorruptionError(f"A read chunk cannot be decoded: {error}.") from error


NONE = Codec("none")


def _blosc(cname: str, clevel: int, shuffle: str, itemsize: int, blocksize: int) -> Codec:
    configuration = {
        "cname": cname,
        "clevel": clevel,
        "shuffle": shuffle,
        "typesize": itemsize,
        "blocksize": blocksize,
    }
    return Codec("blosc", tuple(configuration.items()))


def _fast(itemsize: int) -> Codec:
    return _blosc("lz4", 1, "bitshuffle", itemsize, 0)


def _small(itemsize: int) -> Codec:
    return _blosc("zstd", 1, "shuffle", itemsize, _BLOSC_BLOCK_BYTES)


def shuffle_zlib(level: int, elementsize: int) -> Codec:
    """Return HDF5's filters shuffle and deflate; no shuffle where an element is a byte."""
    return Codec(SHUFFLE_ZLIB, (("level", level), ("elementsize", elementsize)))


_CHOOSERS = (_fast, _small, partial(shuffle_zlib, 1))
CHOSEN = frozenset([NONE, *(choose(1 << n) for choose in _CHOOSERS for n in range(5))])
"""The codecs of ``None``, ``"fast"`` and ``"small"``, for elements of 1 to 16 bytes."""


def _from_numcodecs(codec: numcodecs.abc.Codec, itemsize: int) -> Codec:
    config = codec.get_config()
    if codec.codec_id == "blosc":
        automatic = "bitshuffle" if itemsize == 1 else "shuffle"
        shuffle = _SHUFFLES.get(config["shuffle"], automatic)
        return _blosc(config["cname"], config["clevel"], shuffle, itemsize, config["blocksize"])
    if codec.codec_id == "zstd":
        return Codec("zstd", (("level", config["level"]), ("checksum", False)))
    return Codec("gzip", (("level", config["level"]),))


@dataclass(frozen=True, slots=True)
class CompressionRules:
    """The parsed ``compression`` option: which codec an array gets."""

    rules: tuple[tuple[str, Compression], ...]
    """FQN pattern and compression; the first that matches holds."""
    filters: bool = False
    """Whether codecs are to be filters of HDF5."""

    @classmethod
    def parse(cls, option: CompressionOption) -> CompressionRules:
        """Check and freeze a ``compression`` option.

        Raises
        ------
        OptionError
            If it names a codec that is not written.
        """
        rules = dict(option) if isinstance(option, Mapping) else {"": option}
        for pattern, compression in rules.items():
            _check(compression, f" for pattern {pattern!r}" if pattern else "")
        return cls(tuple(rules.items()))

    def check_patterns(self, fqns: Sequence[str]) -> None:
        """Raise where a pattern selects no entry of the checkpoint."""
        for pattern, _ in self.rules:
            names.select(pattern, fqns, where="the state dict (an option 'compression' names it)")

    def codec(self, fqn: str, itemsize: int, read_chunk_nbytes: int) -> Codec:
        """Return the codec of an array, given the uncompressed size of its read chunks."""
        for pattern, compression in self.rules:
            if not pattern or any(names.pattern_matches(pattern, [fqn])):
                return self._codec(compression, itemsize, read_chunk_nbytes)
        return self._codec("small" if self.filters else "fast", itemsize, read_chunk_nbytes)

    def _codec(self, compression: Compression, itemsize: int, read_chunk_nbytes: int) -> Codec:
        if self.filters and compression == "small":
            return shuffle_zlib(1, itemsize)
        codec = _codec(compression, itemsize, read_chunk_nbytes)
        if self.filters and codec.name == "gzip":
            return shuffle_zlib(dict(codec.configuration)["level"], 1)
        return codec

    def __str__(self) -> str:
        """Describe the rules so that equal rules have equal descriptions."""
        described = {
            pattern: compression
            if compression is None or isinstance(compression, str)
            else compression.get_config()
            for pattern, compression in self.rules
        }
        return f"{described}{' as filters' if self.filters else ''}"


def _check(compression: object, where: str) -> None:
    if compression in (None, "fast", "small"):
        return
    import numcodecs  # noqa: PLC0415  takes long

    kind = getattr(compression, "codec_id", None)
    if not isinstance(compression, numcodecs.abc.Codec) or kind not in ("blosc", "zstd", "gzip"):
        raise OptionError(f"compression={compression!r}{where} is not one of {_ALLOWED}.")
    if kind == "gzip" and not 0 <= compression.level <= _MAX_GZIP_LEVEL:
        raise OptionError(f"compression={compression!r}{where}: levels of gzip are 0 to 9.")
    try:
        compression.encode(bytes(8))
    except (ValueError, RuntimeError) as error:
        raise OptionError(f"compression={compression!r}{where} cannot be used: {error}.") from error


def _codec(compression: Compression, itemsize: int, read_chunk_nbytes: int) -> Codec:
    if compression is None or not 0 < read_chunk_nbytes <= _BLOSC_MAX_BYTES:
        return NONE
    if compression == "fast" or (compression == "small" and read_chunk_nbytes < SMALL_MIN_BYTES):
        return _fast(itemsize)
    return _small(itemsize) if compression == "small" else _from_numcodecs(compression, itemsize)
