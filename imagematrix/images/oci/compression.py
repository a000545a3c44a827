"""The compression of layers: its type and level, and compressing in several threads.

The number of threads does not change a byte. libzstd cuts the content into jobs if it has threads to
run them, and then its result differs from that without threads; so it always gets at least one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from imagematrix.images.oci import deflate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What to do if an engine or a registry may not know zstd.
GZIP_REMEDY = "if it takes no layers compressed with zstd, set `compression: gzip` in matrix.yaml"
ZSTD = b".tar+zstd"  # in a manifest: a layer compressed with zstd
LEVELS = {"zstd": range(1, 20), "gzip": range(1, 10)}
DEFAULT_LEVELS = {"zstd": 3, "gzip": deflate.LEVEL}
WORKERS = 8  # of libzstd, at most: at level 19 each needs 90 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compression of the layers that a build writes: zstd or gzip, and its level."""

    type: str
    level: int

    def __str__(self) -> str:
        return f"{self.type} -{self.level}"

    @property
    def media_type(self) -> str:
        """The media type of a layer."""
        return f"application/vnd.oci.image.layer.v1.tar+{self.type}"


DEFAULT = Compression(type="zstd", level=DEFAULT_LEVELS["zstd"])


def compress(pieces: Iterable[bytes], compression: Compression, workers: int) -> Iterator[bytes]:
    """Yield the content of `pieces` compressed by `workers` threads, neither with a name nor with a time."""
    if compression.type == "gzip":
        return deflate.compress_gzip(pieces, workers, compression.level)
    return _compress_zstd(pieces, compression.level, min(workers, WORKERS))


def has_zstd(manifest: bytes) -> bool:
    """Whether the manifest of an image names a layer that is compressed with zstd."""
    return ZSTD in manifest


def get_libzstd_version() -> str:
    """Return the version of libzstd: another version may give other bytes."""
    import zstandard

    return ".".join(map(str, zstandard.ZSTD_VERSION))


def get_library(compression: Compression) -> str:
    """Return the library that compresses, and its version, which decides the bytes."""
    return (
        f"libzstd {get_libzstd_version()}"
        if compression.type == "zstd"
        else f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
    )


def _compress_zstd(pieces: Iterable[bytes], level: int, workers: int) -> Iterator[bytes]:
    import zstandard

    # The parameters are those for content of unknown size, so they do not depend on how much there is.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, threads=max(1, workers), write_checksum=True
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    for piece in pieces:
        yield stream.compress(piece)
    yield stream.flush()
