"""What one image for all the GPUs of several would weigh: the fat image that they stand for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.audit.report import Audit

__all__ = ["fat"]


def fat(audits: Sequence[Audit]) -> int | None:
    """Return the compressed bytes of one image with all the device code that several images have.

    It is the largest of them, each with the device code that it lacks of the others: for each file and target
    the largest that one of them has. Device code counts as it is stored in files, so that this is too much
    where a layer compresses it further; code for several CPUs would come on top. None for a single image, or
    where one has no device code, or no sizes.
    """
    own = [_code(one) for one in audits]
    if len(audits) < 2 or not all(own) or not all(one.image.sizes for one in audits):  # noqa: PLR2004 - several
        return None
    every: dict[tuple[str, str], int] = {}
    for code in own:
        for key, size in code.items():
            every[key] = max(size, every.get(key, 0))
    whole = sum(every.values())
    return max(
        sum(one.image.sizes.values()) + whole - sum(code.values())
        for one, code in zip(audits, own, strict=True)
    )


def _code(audited: Audit) -> dict[tuple[str, str], int]:
    """Return the bytes of device code by file and target."""
    return {(one.path, target): size for one in audited.coded for target, size in one.file.code.sizes}
