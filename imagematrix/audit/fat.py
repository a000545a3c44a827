"""The size of a fat image: one image for the GPUs of several variants."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.audit.report import Audit

__all__ = ["fat"]


def fat(audits: Sequence[Audit]) -> int | None:
    """Return the estimated compressed bytes of one image with the device code of several images.

    To each image's size it adds the device code that the image lacks and another one has, with the largest
    size for each file and target; the result is the largest sum. Device code counts with its size in files,
    so the estimate is too high if layers compress it further. Code for several CPUs is not included. Returns
    None for a single image, or if an image has no device code or no known layer sizes.
    """
    codes = [_code(one) for one in audits]
    if len(audits) < 2 or not all(codes) or not all(one.image.sizes for one in audits):  # noqa: PLR2004
        return None
    largest: dict[tuple[str, str], int] = {}
    for code in codes:
        for key, size in code.items():
            largest[key] = max(size, largest.get(key, 0))
    total = sum(largest.values())
    return max(
        sum(one.image.sizes.values()) + total - sum(code.values())
        for one, code in zip(audits, codes, strict=True)
    )


def _code(audited: Audit) -> dict[tuple[str, str], int]:
    """Return the size of the device code by file and target, in bytes."""
    return {(one.path, target): size for one in audited.coded for target, size in one.file.code.sizes}
