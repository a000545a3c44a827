"""The plan of a warm-up: what the selected variant says of it, and what of this node it is for."""

from __future__ import annotations

import posixpath

from imagematrix.common.image_reference import names_registry, split_version
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.images.catalog.labels import get_labels, list_volumes
from imagematrix.images.catalog.warm_image import WarmInput, compute_key, make_warm_tag
from imagematrix.images.catalog.warm_up import is_overlapping, read_warm_up
from imagematrix.images.engine import images
from imagematrix.images.engine.transport import DockerPy
from imagematrix.images.oci.compression import DEFAULT, DEFAULT_LEVELS, Compression, has_zstd
from imagematrix.images.oci.registry import Registry
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.docker.plan import require_variant
from imagematrix.launcher.docker.pull import pull_unless_present
from imagematrix.launcher.warm_up.node_match import make_whole_match, require_equal_gpus, require_known_gpus
from imagematrix.launcher.warm_up.warm_up_session import WarmUpPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from docker import DockerClient

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.engine.pull import PullProgress
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.selection.selection import Selection

OLD_ENGINES = Compression(type="gzip", level=DEFAULT_LEVELS["gzip"])  # which unpack no other layers


def name_published(variant: Variant) -> str:
    """Return the name of a variant with its digest; raise UsageError if it is from no registry.

    A variant that was only built here is pulled by nobody, and its files have fractions of seconds, which
    those of a pulled image have not.
    """
    name = variant.reference.partition("@")[0]
    if not names_registry(name) or variant.digest is None:
        remedy = "push it, and name it with its registry: `imagematrix build --push`"
        raise UsageError(f"{name} is in no registry, so that no node pulls it", remedy=remedy)
    return f"{name}@{variant.digest}"


def pull_base(
    selection: Selection, client: DockerClient, on_progress: Callable[[PullProgress], object]
) -> tuple[WarmUp, str]:
    """Pull the selected variant by digest; return its warm-up, and its user, empty for root.

    Raises UsageError if it has no warm-up, and what pulling does.
    """
    variant = require_variant(selection)
    name = name_published(variant)
    pull_unless_present(name, variant.digest, variant.platform, on_progress=on_progress, client=client)
    image = images.require_image(name, DockerPy(client))
    return require_warm_up(image, variant), str((image.get("Config") or {}).get("User") or "")


def require_warm_up(image: Mapping[str, Any], variant: Variant) -> WarmUp:
    """Return the warm-up of a variant; raise UsageError if it has none, or a volume in the place of caches.

    What is written to a volume is in no layer, and not in the size of a container. `image` is its
    configuration, or what an engine tells of it.
    """
    warm_up = read_warm_up(get_labels(image), variant.reference)
    if warm_up is None:
        remedy = "write `warm_up` for the image in matrix.yaml, and raise the version with `imagematrix bump`"
        raise UsageError(f"{variant.reference} has no warm-up", remedy=remedy)
    for path in list_volumes(image):
        if is_overlapping(ROOT, posixpath.normpath(path)):
            remedy = "take that VOLUME out of its Dockerfile or base, and raise the version"
            message = f"{variant.reference} has the volume {path}, from which no caches are kept"
            raise UsageError(message, remedy=f"{remedy} with `imagematrix bump`")
    return warm_up


def make_warm_up_plan(
    request: LaunchRequest, warm_up: WarmUp, digests: Mapping[str, str], user: str
) -> WarmUpPlan:
    """Return the plan of a warm-up on GPUs that `request` may get; `digests` are those of its inputs.

    Raises UsageError if these GPUs differ or a fact of them is unknown, and what planning a launch does.
    """
    require_equal_gpus([gpu for choice in request.choices for gpu in choice.gpus])
    selection, _ = request.plan_on_any()
    variant = require_variant(selection)
    match = make_whole_match(request.host, selection.chosen_gpus, variant, warm_up)
    require_known_gpus(match)
    base = str(variant.digest)
    key = compute_key(base, warm_up.to_json(), digests, match)
    return WarmUpPlan(
        base=base,
        name=name_published(variant),
        platform=variant.platform,
        user=user,
        warm_up=warm_up,
        match=match,
        inputs=tuple(WarmInput(name=name, path=path, digest=digests[name]) for name, path in warm_up.inputs),
        key=key,
        tag=make_warm_tag(selection.version, base, key),
        compression=choose_compression(variant),
    )


def choose_compression(variant: Variant) -> Compression:
    """Return the compression of a variant's own layers, for the nodes that pull it."""
    name = name_published(variant)
    with Registry(split_version(name)[0]) as registry:
        manifest = registry.find_manifest(str(variant.digest))
    if manifest is None:
        remedy = f"push it again, and check with `docker manifest inspect {quote_word(name)}`"
        raise UsageError(f"{name} is not in its registry any more", remedy=remedy)
    return DEFAULT if has_zstd(manifest.raw) else OLD_ENGINES
