"""Whether an image's own code looks as if it was compiled for the march in its catalog entry."""

from __future__ import annotations

from imagematrix.audit.claims import MACHINES
from imagematrix.audit.host_code import NAMES
from imagematrix.audit.report import needs_level
from imagematrix.facts import marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from imagematrix.audit.report import Audit, Found
    from imagematrix.catalog.catalog import Variant

__all__ = ["doubts"]

SHOWN = 3  # files or functions that a sentence names


def doubts(audited: Audit, variant: Variant) -> list[str]:
    """Return warnings that a march had no effect, or that code may need more than the march.

    There are none if the entry has no march, or a march that is its architecture's baseline. Code that is
    proven to need more is a contradiction, not a warning.
    """
    _, arch = MACHINES.get(variant.platform.split("/")[1], (None, ""))
    baseline = dict(marches.LEVELS)["x86-64-v1"] if arch == "x86_64" else frozenset()
    if variant.march is None or arch not in marches.IGNORED or not variant.cpu_flags - baseline:
        return []
    programs = list(audited.programs)
    return [*_without_effect(programs, variant.march), *_above(programs, variant, marches.IGNORED[arch])]


def _without_effect(programs: list[Found], march: str) -> Iterator[str]:
    # Functions named for CPUs do not count: they are compiled for these CPUs whatever the march.
    hosts = [one.file.host for one in programs]
    plain = all(host and host.whole and not (host.required or host.undecided) for host in hosts)
    if programs and plain and not any(needs_level(one.file) for one in programs):
        paths = _some([one.path for one in programs])
        yield f"-march={march} shows no effect: nothing in {paths} is beyond the baseline"


def _above(programs: list[Found], variant: Variant, ignored: AbstractSet[str]) -> Iterator[str]:
    for one in programs:
        host = one.file.host
        if host is None or set(host.signs) - {NAMES}:  # the file detects the CPU, so it may choose
            continue
        above = sorted(host.undecided - variant.cpu_flags - ignored)
        if above:
            names = _some(sorted({name for flag in above for name in host.functions[flag].names}))
            where = f" in {names}" if names else ""
            yield (
                f"{one.path} has code beyond -march={variant.march}{where}: {' '.join(above)}; "
                "nothing shows that it checks the CPU before using it"
            )


def _some(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
