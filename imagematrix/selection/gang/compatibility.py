"""Which variants the ranks of one job may run together: those that are alike in what the ranks share.

Ranks may differ in the CPU that they are compiled for, in device code and in the driver. They share a
platform, the image's own axes, whether they use GPUs, and the libraries that the user names. What is unknown
of a variant is like nothing of any other.
"""

from __future__ import annotations

import re

from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import LIBRARY, UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from imagematrix.images.catalog.catalog import Variant

    Alike = str | Sequence[str] | None  # "cuda,nccl", or a list of such names

CUDA = "cuda"
USUAL = (CUDA, "nccl", "mpi", "torch")  # what ranks on several nodes share, if nobody says otherwise
# Names that are right even if no variant has such a library. Any other is most likely misspelt.
KNOWN = (*USUAL, "rccl", "pmix", "tensorflow", "jaxlib")
NONE = "none"


def parse_alike(alike: Alike, variants: Iterable[Variant]) -> tuple[str, ...] | None:
    """Return the names in `alike` without repetitions, or None if it is None; raise UsageError.

    A name is "cuda", or that of a library which some variant has, or of a well-known one.
    """
    if alike is None:
        return None
    words = re.split(r"[\s,]+", alike.strip()) if isinstance(alike, str) else list(alike)
    names = tuple(dict.fromkeys(words))
    present = {name for variant in variants for name, _ in variant.libraries or ()}
    for name in names:
        if not isinstance(name, str) or not LIBRARY.fullmatch(name):
            raise UsageError(
                f"invalid names of libraries: {name!r:.80}", remedy=f"name them as in {','.join(USUAL)}"
            )
        if name not in KNOWN and name not in present:
            choices = sorted({*KNOWN, *present})
            raise UsageError(
                f"no variant has a library {name!r}",
                remedy=suggest_nearest(name, choices) or f"one of {', '.join(choices)}",
            )
    return names


def make_compatibility_key(variant: Variant, names: Sequence[str] | None) -> Hashable:
    """Return what is equal for variants that may run together; without `names`, no two may."""
    if names is None:
        return variant.reference
    versions = tuple([_get_version(variant, name) for name in names])
    shared = (variant.platform, variant.gpu, variant.axes, versions)
    return (*shared, variant.reference) if UNKNOWN in versions else shared


def count_unknown_versions(variants: Iterable[Variant], names: Sequence[str]) -> dict[str, int]:
    """Return for each name the number of variants of which the version is unknown, if there are any."""
    variants = list(variants)
    counts = {name: sum(_get_version(variant, name) == UNKNOWN for variant in variants) for name in names}
    return {name: count for name, count in counts.items() if count}


def describe_shared_libraries(variant: Variant, names: Sequence[str]) -> str:
    """Return what a variant shares with those that are like it, as in "cuda 12.4, nccl 2.27.3, no mpi"."""
    versions = {name: _get_version(variant, name) for name in names}
    return ", ".join(
        f"no {name}" if version == NONE else f"{name} {version}" for name, version in versions.items()
    )


def _get_version(variant: Variant, name: str) -> str:
    """Return the version of a library in a variant, "none" if it has none, or "unknown"."""
    if name == CUDA:
        return variant.cuda or (UNKNOWN if variant.gpu or variant.source(CUDA) == UNKNOWN else NONE)
    if variant.libraries is None:
        return UNKNOWN
    return dict(variant.libraries).get(name, NONE) or UNKNOWN
