"""CUDA's runtime in an image, compared with the drivers that its labels admit.

A program fails with error 35 if the driver is older than the first driver for the runtime's major release:
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
    """Yield a warning for each runtime that needs a newer driver than the labels require.

    It is not a contradiction, because the image's program may never load this runtime.
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
