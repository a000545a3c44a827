"""What of an image's catalog entry its bytes prove: the entry's `facts`."""

from __future__ import annotations

from imagematrix.catalog.catalog import BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["BUILT", "proven"]

# What the bytes of nearly every image that is built prove. Its CPU flags are what its compiler says, and a
# program that has CUDA's runtime in it does not say of which release that is.
BUILT = (("cubins", BYTES), ("driver", BYTES))


def proven(audited: Audit, variant: Variant) -> tuple[tuple[str, str], ...]:
    """Return the facts of an entry that nothing contradicts: those that the bytes prove.

    The driver is always one: it is there in this version, or there is none. Device code is one unless the
    program compiles it when it runs, or the entry is silent about some that is there.
    """
    told = bool(variant.cubins or variant.ptx)
    return BUILT if told == any(True for _ in audited.coded) else (("driver", BYTES),)
