"""Which parts of a catalog entry the image's bytes prove: the entry's `facts`."""

from __future__ import annotations

from imagematrix.audit import promise
from imagematrix.catalog.catalog import BYTES, Ptx
from imagematrix.facts import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["BUILT", "code", "proven"]

# The facts that the bytes prove for nearly every image that is built. The CPU flags come from the compiler,
# and a program with a static CUDA runtime does not state the runtime's release.
BUILT = (("cubins", BYTES), ("driver", BYTES))


def proven(audited: Audit, variant: Variant) -> tuple[tuple[str, str], ...]:
    """Return the facts that the bytes prove in an entry without contradictions.

    The driver is always proven: the image has this version, or none. Device code is proven unless the entry
    claims some and no file has any (the program compiles it when it runs), or the reverse.
    """
    claimed = bool(variant.cubins or variant.ptx)
    return BUILT if claimed == any(True for _ in audited.coded) else (("driver", BYTES),)


def code(audited: Audit, variant: Variant) -> tuple[tuple[str, ...], tuple[Ptx, ...]]:
    """Return the cubins and the PTX that the labels of a trimmed image can promise.

    `variant` is the entry before trimming. The result has those of its cubins that all files cover, and the
    PTX that all files have. If neither runs on the variant's GPUs, the promise stays as it is, and the audit
    reports the contradiction.
    """
    codes = [one.file.code for one in audited.coded if one.file.code.cuda]
    cubins = tuple(one for one in variant.cubins if not any(promise.lacks(code, one) for code in codes))
    ptx = tuple(Ptx(target=target, isa=isa) for target, isa in audited.ptx)
    computes = map(device_code.capability, variant.cubins)
    if cubins or all(any(device_code.ptx_runs(one.target, compute) for one in ptx) for compute in computes):
        return cubins, ptx
    return variant.cubins, variant.ptx
