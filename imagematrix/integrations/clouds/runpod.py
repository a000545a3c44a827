"""Bodies of RunPod's REST API v2 for POST /v2/pods: one for each GPU type on which a variant fits.

A pod is placed on one GPU type, and on a machine whose driver supports a CUDA release: at least
`minCudaVersion`, or one of `allowedCudaVersions`. RunPod adds the machine's driver to every container.
Sources: https://docs.runpod.io/api-reference-v2/pods/create-a-pod, and for the GPU types in runpod.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files

from imagematrix.common.image_reference import split_version
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, gpus, versions
from imagematrix.integrations.clouds.image_needs import LeftOut, describe_releases, find_image_needs
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.selection.needs.knowledge import CUDA, GPU_NAME, Knowledge
from imagematrix.selection.selection_target import MACHINES
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.integrations.clouds.image_needs import ImageNeeds
    from imagematrix.selection.needs.need import Need

NAME = "runpod"
KNOWS = frozenset({CUDA, GPU_NAME})
NO_GPU = "it is for CPUs only, and a body asks for a GPU"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A variant for a GPU type, and the CUDA releases with whose drivers it fits; `last` is None for all."""

    gpu: str
    variant: Variant
    need: Need
    first: str
    last: str | None


def find_runpod_needs(catalog: Catalog) -> ImageNeeds:
    """Return the needs of a version in what RunPod knows: the CUDA release and the name of the GPU type."""
    table = json.loads((files(__package__) / "runpod.json").read_text(encoding="utf-8"))
    knowledge = Knowledge(vocabulary=VOCABULARY, words=KNOWS, gpu_names=tuple(table["gpus"]))
    needs = find_image_needs(catalog, knowledge, injects=True)
    others = [one for one in needs.variants if not one.variant.gpu]
    return replace(
        needs,
        variants=tuple(one for one in needs.variants if one.variant.gpu),
        left_out=(
            *needs.left_out,
            *(LeftOut(reference=one.variant.reference, reason=NO_GPU) for one in others),
        ),
    )


def make_bodies(needs: ImageNeeds) -> list[dict[str, Any]]:
    """Return a body for each GPU type, sorted by type: with the variant that fits on the most machines.

    Of several, the one whose code needs the least of the CPU, which RunPod does not tell, and then the one
    that `select` prefers. Raises UsageError if a variant is in no registry, or if those that are equally good
    differ in an axis of the image's own.
    """
    offers: dict[str, list[Offer]] = {}
    for offer in _list_offers(needs):
        offers.setdefault(offer.gpu, []).append(offer)
    name = f"{split_version(needs.catalog.image)[0].rpartition('/')[2]}-{needs.catalog.version}"
    return [
        _make_body(name, _choose_offer(needs.catalog, same_gpu)) for _, same_gpu in sorted(offers.items())
    ]


def _list_offers(needs: ImageNeeds) -> Iterator[Offer]:
    for one in needs.variants:
        for alternative in one.alternatives:
            if alternative.gpu_names:
                releases = describe_releases(alternative.need)
                for gpu in alternative.gpu_names:
                    yield Offer(
                        gpu=gpu,
                        variant=one.variant,
                        need=alternative.need,
                        first=str(releases["first"]),
                        last=releases["last"],
                    )


def _choose_offer(catalog: Catalog, offers: Sequence[Offer]) -> Offer:
    def rank(offer: Offer) -> tuple[Any, ...]:
        return offer.last is not None, versions.make_sort_key(offer.first), len(offer.need.flags)

    best = min(map(rank, offers))
    equal = {offer.variant.reference: offer for offer in offers if rank(offer) == best}
    variants = tuple(offer.variant for offer in equal.values())
    sample = _make_sample_host(next(iter(equal.values())), variants)
    selection = Selector(catalog.keep(variants)).explain(sample)
    if ambiguity := selection.decision.ambiguity:
        raise UsageError(ambiguity[0], remedy=ambiguity[1].shown)
    return equal[selection.selected or variants[0].reference]


def _make_sample_host(offer: Offer, variants: Sequence[Variant]) -> Host:
    """Return a machine with the oldest driver and a GPU of an offer."""
    compute = gpus.find_products(offer.gpu)[0].compute
    flags = frozenset().union(*(variant.cpu_flags for variant in variants))
    return Host(
        arch=MACHINES.get(offer.need.arch, offer.need.arch),
        cpu=Cpu(vendor=None, model=None, flags=flags, level=None),
        driver=Driver(version=cuda.list_first_drivers()[offer.first], kind=None, source=NAME),
        gpus=(Gpu(index=0, name=offer.gpu, compute=compute, brand=gpus.get_brand(offer.gpu)),),
    )


def _make_body(name: str, offer: Offer) -> dict[str, Any]:
    gpu: dict[str, Any] = {"id": offer.gpu}
    if offer.last is None:
        gpu["minCudaVersion"] = offer.first
    else:
        releases = [*cuda.list_first_drivers()]
        gpu["allowedCudaVersions"] = releases[releases.index(offer.first) : releases.index(offer.last) + 1]
    return {"name": name, "image": _name_by_digest(offer.variant), "gpu": gpu}


def _name_by_digest(variant: Variant) -> str:
    image, _ = split_version(variant.reference)
    if variant.digest is None or "/" not in image:
        name = f"registry.example.com/ml/{image}:VERSION"
        raise UsageError(
            f"{variant.reference} is in no registry, from which RunPod could pull it by its digest",
            remedy="publish the version, and name it with its registry: "
            f"`imagematrix needs {quote_word(name)} --for runpod`",
        )
    return f"{image}@{variant.digest}"
