"""Bringing the image of a Selection into the engine: by digest, and under the variant's name."""

from __future__ import annotations

from functools import partial

from imagematrix.common.image_reference import split_version
from imagematrix.errors import UsageError
from imagematrix.images.catalog.engine import get_repository_digest
from imagematrix.images.catalog.sources import require_signed
from imagematrix.images.engine import images, transport
from imagematrix.images.engine.pull import ignore_progress
from imagematrix.images.engine.pull import pull_image as pull_into_engine
from imagematrix.launcher.docker.plan import find_engine_digests, format_start_name, get_start_image
from imagematrix.launcher.docker.zstd_check import require_unpackable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    import docker

    from imagematrix.images.engine.pull import PullProgress
    from imagematrix.selection.selection import Selection


def pull(
    selection: Selection,
    *,
    policy: str | PathLike[str] | None = None,
    report: Callable[[PullProgress], object] = ignore_progress,
    client: docker.DockerClient | None = None,
) -> str:
    """Pull the image to start for `selection` unless the engine has it, and return REFERENCE@DIGEST.

    If its warm image cannot be pulled, or lacks a signature, that is the variant.

    Its signatures are checked first, as the site's policy and the user's require: the file `policy`, or else
    the one that the environment names. An image that only the engine has stays as it is; the answer has no
    digest if the engine keeps no manifests. Raises what `pull_unless_present` does, UsageError if nothing was
    selected, AuditError if the name now stands for an image that was built on the variant, and
    SignatureError if a signature is missing or wrong.
    """
    bring = partial(pull_start_image, policy=policy, report=report, client=client)
    if selection.warm is None:
        return bring(selection)
    from imagematrix.launcher.docker.warm_start import fetch_start_image

    return fetch_start_image(selection, bring, policy)[1]


def pull_start_image(
    selection: Selection,
    *,
    policy: str | PathLike[str] | None = None,
    report: Callable[[PullProgress], object] = ignore_progress,
    before_pull: Callable[[], object] = lambda: None,
    client: docker.DockerClient | None = None,
) -> str:
    """Pull the image to start for a selection as `pull` does, but the warm image or none if one fits.

    `before_pull` is called if the engine lacks the image.
    """
    variant = selection.variant
    if variant is None:
        raise UsageError("cannot pull: nothing was selected")
    require_signed(variant, policy, version=selection.version)
    engine = transport.DockerPy(client) if client else None
    digests = find_engine_digests(selection, partial(images.inspect_image, transport=engine))
    image = get_start_image(selection)
    reference = format_start_name(image, digests)
    pull_unless_present(
        reference,
        image.digest,
        variant.platform,
        before_pull=before_pull,
        on_progress=report,
        client=client,
    )
    if "@" in reference:
        return reference
    details = images.require_image(reference, engine)
    digest = get_repository_digest(details, split_version(reference)[0])
    has_digest = any(str(name).endswith(f"@{digest}") for name in details.get("RepoDigests") or ())
    return f"{reference}@{digest}" if has_digest else reference


def pull_unless_present(
    reference: str,
    digest: str | None,
    platform: str | None,
    *,
    before_pull: Callable[[], object] = lambda: None,
    on_progress: Callable[[PullProgress], object] = ignore_progress,
    client: docker.DockerClient | None = None,
) -> None:
    """Pull an image by digest unless the engine has it, and give it its name unless another image has that.

    `reference` is the name of a Launch: with a digest, the image of that digest is needed, else the image of
    that name is. `digest` is the image's, None if its catalog has none: it is then pulled by `reference`.
    Raises UnknownImageError if neither engine nor registry has the image, and EngineError if one of them
    cannot be reached or the pull fails.
    """
    engine = transport.DockerPy(client) if client else None
    name, _, named_digest = reference.partition("@")
    if name == reference and images.inspect_image(name, engine):
        return
    image, tag = split_version(name)
    wanted = digest or named_digest
    exact = f"{image}@{wanted}" if wanted else name
    if images.inspect_image(exact, engine) is None:
        require_unpackable(exact, engine)
        before_pull()
        pull_into_engine(exact, platform=platform, on_progress=on_progress, client=client)
    if tag and exact != name and images.inspect_image(name, engine) is None:
        images.tag_image(exact, image, tag, client)
