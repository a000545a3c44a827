"""What of an image's catalog entry its bytes prove: the entry's `facts`."""

from __future__ import annotations

from imagematrix.audit import promise
from imagematrix.catalog.catalog import BYTES, Ptx
from imagematrix.facts import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["BUILT", "code", "proven"]

# What the bytes of nearly every image that is built prove. Its CPU flags are what its compiler says, and a
# program that has CUDA's runtime in it does not say of which release that is.
BUILT = (("cubins", BYTES), ("driver", BYTES))


def proven(audited: Audit, variant: Variant) -> tuple[tuple[str, str], ...]:
    """Return the facts of an entry that nothing contradicts: those that the bytes prove.

    The driver is always one: it is there in this version, or there is none. Device code is one unless the
    program compiles it when it runs, or the entry is silent about some that is there.
    """
    claimed = bool(variant.cubins or variant.ptx)
    return BUILT if claimed == any(True for _ in audited.coded) else (("driver", BYTES),)


def code(audited: Audit, variant: Variant) -> tuple[tuple[str, ...], tuple[Ptx, ...]]:
    """Return the cubins and the PTX to promise for an image whose files were trimmed to those of `variant`.

    These are its cubins, if all files have some that run there, and the PTX that all files have. Where
    neither runs on these GPUs, the promise stays what it was, and the files contradict it.
    """
    codes = [one.file.code for one in audited.coded if one.file.code.cuda]
    cubins = tuple(one for one in variant.cubins if not any(promise.lacks(code, one) for code in codes))
    ptx = tuple(Ptx(target=target, isa=isa) for target, isa in audited.ptx)
    computes = map(device_code.capability, variant.cubins)
    if cubins or all(any(device_code.ptx_runs(one.target, compute) for one in ptx) for compute in computes):
        return cubins, ptx
    return variant.cubins, variant.ptx
