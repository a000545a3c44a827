"""Which parts of a catalog entry the image's bytes prove: the entry's `facts`."""

from __future__ import annotations

from imagematrix.audit.contradictions import get_machine, list_known_flags
from imagematrix.audit.images import device_code_entries
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import cuda, device_code, marches
from imagematrix.images.catalog.catalog import BYTES, CLAIM, PROBABLE, Ptx

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.report import Audit
    from imagematrix.images.catalog.catalog import Variant


def find_proven_facts(audited: Audit, variant: Variant) -> tuple[tuple[str, str], ...]:
    """Return the facts that the bytes prove in an entry without contradictions.

    Of CPU flags, the entry keeps its fact. The driver is always proven: the image has this version, or none.
    Device code is proven unless the entry is for GPUs and no file has any (the program compiles it when it
    runs), or the reverse.
    """
    flags = [fact for fact in variant.facts if fact[0] == "cpu_flags"]
    driver = ("driver", BYTES)
    if not any(True for _ in audited.gpu_code):
        return (*flags, ("cubins", CLAIM if variant.gpu else BYTES), driver)
    if not variant.gpu:
        return (*flags, driver)
    return (*flags, ("cubins", audited.source), driver)


def with_signing(audited: Audit, variant: Variant) -> Variant:
    """Return the entry as one that signs return addresses if its image does.

    An option of the compiler decides it, whatever the march.
    """
    signs = variant.signed_returns or not marches.SIGNING.isdisjoint(audited.flags)
    return replace(variant, signed_returns=signs)


def with_flags(audited: Audit, variant: Variant) -> Variant:
    """Return the entry with the CPU flags beyond its march that the image probably, or partly, needs.

    The entry stays as it is if it has no march, or if it claims its CPU flags.
    """
    _, arch = get_machine(variant.platform)
    if variant.march is None or arch not in marches.IGNORED or ("cpu_flags", CLAIM) in variant.facts:
        return variant
    known = list_known_flags(variant)
    probable = audited.probable_flags.keys() - known
    partial = audited.partial_flags.keys() - known
    facts = (*variant.facts, *([("cpu_flags", PROBABLE)] if probable else []))
    return replace(
        variant,
        cpu_flags=variant.cpu_flags | probable,
        signed_returns=variant.signed_returns or not marches.SIGNING.isdisjoint(probable),
        partial_flags=frozenset(partial),
        facts=tuple(sorted(facts)),
    )


def with_code(audited: Audit, variant: Variant, *, trimmed: bool) -> Variant:
    """Return an entry with the cubins, the PTX and the exact device code that an image's labels can promise.

    `variant` is the entry that its cell promises. The exact code is, of each file, what runs best on the GPUs
    of the cell; it is left out if cubins and PTX say the same. The cubins are those that all files cover, the
    PTX is what all files have: only a `trimmed` image needs no cubin for exactly these GPUs. If some file has
    no code for them, or only PTX that the image's own driver does not compile, the promise stays as it is,
    and the audit reports the contradiction.
    """
    codes = [unit.code for unit in audited.gpu_code]
    if not codes or not variant.cubins or variant.device_code:
        return variant
    computes = {compute for target in variant.cubins for compute in device_code.expand_target(target)}
    present = {device_code.get_capability(target) for code in codes for target in code.cubins}
    native = all(device_code.get_capability(target) in present for target in variant.cubins)
    exact = [
        entry if entry.optional else device_code_entries.narrow_entry(entry, computes)
        for entry in audited.device_code
    ]
    driver = variant.driver.version if variant.driver else None
    newest = cuda.get_newest_ptx_isa(driver) if driver else None
    runs = all(
        device_code_entries.serves_all(entry, computes, newest) for entry in exact if not entry.optional
    )
    if not runs or not (trimmed or native):
        return variant
    cubins = tuple(
        cubin
        for cubin in variant.cubins
        if not any(device_code_entries.lacks_cubin(unit.code, cubin, unit.guard) for unit in audited.gpu_code)
    )
    ptx = tuple(Ptx(target=target, isa=isa) for target, isa in audited.ptx) if trimmed else ()
    joined = device_code_entries.join_entries(exact)
    # A list that says the same as cubins and PTX would only make the labels longer.
    targets = [(entry.cubins, entry.ptx, entry.parts) for entry in joined]
    is_redundant = targets in ([(cubins, ptx, ())], [(cubins, (), ())])
    return replace(variant, cubins=cubins, ptx=ptx, device_code=() if is_redundant else joined)
