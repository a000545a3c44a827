"""Whether the engine can unpack the layers of an image before it pulls them from a registry."""

from __future__ import annotations

import contextlib

from imagematrix.common.image_reference import split_version
from imagematrix.errors import EngineError, ImagematrixError
from imagematrix.images.engine import releases, system
from imagematrix.images.oci.compression import has_zstd
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.images.engine.transport import Transport


def require_unpackable(reference: str, transport: Transport | None = None) -> None:
    """Raise EngineError if the engine cannot unpack the image that it is to pull, by tag, digest or both.

    It would fail only after the download, and without the reason. The registry is queried only for engines
    that lack something; if it does not answer, the pull says why.
    """
    docker = system.get_docker_version(transport)
    if releases.ZSTD_LAYERS.is_in(docker):
        return
    name, _, digest = reference.partition("@")
    image, tag = split_version(name)
    manifest = None
    with contextlib.suppress(ImagematrixError), Registry(image) as registry:
        manifest = registry.find_manifest(digest or str(tag))
    if manifest and has_zstd(manifest.raw):
        raise EngineError(
            f"{reference} has layers compressed with zstd, which Docker {docker} cannot unpack",
            remedy=releases.ZSTD_REMEDY,
        )
