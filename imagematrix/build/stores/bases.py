"""Base images of builds: their digests in registries, and their ONBUILD triggers, which builds carry out."""

from __future__ import annotations

import contextlib
import re

from imagematrix.build.dockerfile.dockerfile import require_known_inputs
from imagematrix.common import json_documents
from imagematrix.common.image_reference import Reference
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.engine import transport
from imagematrix.images.oci.manifest import INDEXES, Descriptor, ImageIndex, parse_manifest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    import docker

ARCHITECTURES = ("amd64", "arm64")  # the architectures of a matrix
KEY = "OnBuild"
DEBIAN = re.compile(r"debian:([a-z]+)(?:-slim)?", re.ASCII)


def resolve_in_registry(client: docker.DockerClient, reference: str) -> str:
    """Return the digest of an image in its registry, which the engine asks.

    Raises UsageError if the registry has no such image, EngineError if it does not answer.
    """
    return str(_describe_in_registry(client, reference)["digest"])


def is_index_in_registry(client: docker.DockerClient, reference: str) -> bool:
    """Whether an image is an index of images for several platforms; raises as `resolve_in_registry`."""
    return _describe_in_registry(client, reference)["mediaType"] in INDEXES


def _describe_in_registry(client: docker.DockerClient, reference: str) -> dict[str, Any]:
    """Return the descriptor of an image in its registry; raise as `resolve_in_registry`."""
    import docker

    with transport.convert_errors():
        try:
            return dict(client.api.inspect_distribution(reference)["Descriptor"])
        except docker.errors.APIError as error:
            if error.is_server_error():
                message = f"the registry of the image {reference} cannot be reached"
                remedy = f"try again, or {_describe_import(reference)}"
                raise EngineError(f"{message}: {error.explanation}", remedy=remedy) from error
            message = f"the image {reference} is neither in the engine nor in its registry"
            remedy = f"run `docker pull {quote_word(reference)}`, or {_describe_import(reference)}"
            raise UsageError(f"{message}: {error.explanation}", remedy=remedy) from error


def _describe_import(reference: str) -> str:
    """Return how an image gets into the engine without its registry."""
    debian = DEBIAN.fullmatch(reference)
    if debian:
        archive = f"tar -C tree -c . | docker import - {quote_word(reference)}"
        return f"make it as root: `debootstrap --variant=minbase {quote_word(debian[1])} tree && {archive}`"
    saved = f"`docker save {quote_word(reference)} -o FILE`"
    return f"bring it from a machine that has it: {saved} there, `docker load -i FILE` here"


def require_in_engine(image: Mapping[str, Any], reference: str) -> None:
    """Raise UsageError if an image that the engine told of brings inputs from elsewhere into builds."""
    require_known_inputs(tuple(map(str, (image.get("Config") or {}).get(KEY) or ())), reference)


def require_in_registry(reference: str, digest: str) -> None:
    """Raise UsageError if an image in a registry brings inputs from elsewhere into builds, or is damaged.

    An index has the triggers of its images for the architectures of a matrix. None are known of an image that
    only the engine can read, as behind a mirror of its own.
    """
    triggers: tuple[str, ...] = ()
    with (
        contextlib.suppress(EngineError, UnknownImageError),
        Registry(Reference.parse(reference).name) as registry,
    ):
        triggers = tuple(_read_triggers(registry, digest))
    require_known_inputs(triggers, reference)


def _read_triggers(registry: Registry, digest: str) -> Iterator[str]:
    manifest = registry.find_manifest(digest)
    if manifest is None:
        return
    document = parse_manifest(manifest.raw, digest, Descriptor)
    if isinstance(document, ImageIndex):
        for entry in document.entries:
            if entry.platform.get("architecture") in ARCHITECTURES:
                yield from _read_triggers(registry, entry.digest)
    elif document.config:
        image = json_documents.Fields(
            json_documents.parse_json(registry.fetch_small_blob(document.config.digest), digest), digest
        )
        inner = image.get_object_or_empty("config")
        yield from inner.get_texts(KEY) if inner.has(KEY) else ()
