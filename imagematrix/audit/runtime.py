"""CUDA's runtime in an image, held against the drivers that its labels admit.

A program ends with error 35 where the driver is older than the first one of its runtime's major release:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
"""

from __future__ import annotations

from imagematrix.facts import cuda, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["RUNTIME", "doubts"]

RUNTIME = "cudart"


def doubts(audited: Audit, variant: Variant) -> Iterator[str]:
    """Yield in sentences which runtimes need newer drivers than the labels do.

    These are no contradictions, because a program may never load them.
    """
    own = variant.driver.version if variant.driver else None
    admitted = own or (variant.cuda and cuda.lowest_driver(variant.cuda, variant.oldest_driver))
    for library in audited.libraries:
        oldest = library.oldest_driver
        if library.name == RUNTIME and oldest and admitted and _older(admitted, oldest):
            has = f"the image has driver {own}" if own else f"CUDA {variant.cuda} admits driver {admitted}"
            yield (
                f"{library.path} is the runtime of CUDA {library.version}, which needs driver {oldest} "
                f"or newer, and {has}"
            )


def _older(driver: str, other: str) -> bool:
    return versions.order(driver) < versions.order(other)
