"""The image that a plain `docker pull` of a version gets: one for each architecture, or none.

An engine takes the first entry for its platform in an index, whatever its CPU. So only one entry for each
architecture, the default, has a plain platform. All others have a platform that no engine has, as BuildKit's
attestations do.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog import labels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.image_index import IndexEntry

# The march that every CPU of an architecture supports.
BASELINE = {"linux/amd64": "x86-64", "linux/arm64": "armv8-a"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformDefault:
    """The variant that a plain pull of a version gets on a `platform`, or None.

    `zstd` says whether it has layers that are compressed with zstd, which old engines cannot unpack.
    """

    platform: str
    variant: Variant | None
    why: str
    zstd: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The CPU flags that the variant's code needs beyond the baseline of the platform."""
        if self.variant is None:
            return ()
        march = BASELINE.get(self.platform)
        common = (marches.get_required_flags(march, "gcc") if march else None) or frozenset()
        return tuple(sorted(self.variant.cpu_flags - common))

    def to_json(self) -> dict[str, object]:
        """Return one element of the Published document's `plain_pull`."""
        return {
            "platform": self.platform,
            "reference": self.variant.reference if self.variant else None,
            "digest": self.variant.digest if self.variant else None,
            "cuda": self.variant.cuda if self.variant else None,
            "needs": list(self.needs),
            "zstd": self.zstd,
            "why": self.why,
        }


def find_defaults(entries: Sequence[IndexEntry]) -> frozenset[str]:
    """Return the digests of the defaults among the entries of an index."""
    return frozenset(entry.digest for entry in entries if entry.ours and not entry.hidden)


def choose_defaults(
    name: str, entries: Iterable[IndexEntry], before: frozenset[str], named_cells: Mapping[str, str]
) -> list[PlatformDefault]:
    """Return the answers of the version `name` to plain pulls, one for each platform of its variants.

    `before` are the digests of its present defaults, which stay. `named_cells` are the cells, by platform,
    that the matrix names. Raises UsageError if the entries are damaged, or differ in their preferences.
    """
    image = name.rpartition(":")[0]
    by_platform: dict[str, list[tuple[Variant, str]]] = {}
    terms = set()
    for entry in entries:
        variant = labels.read_variant(
            entry.annotations, reference=f"{image}:{entry.tag}", digest=entry.digest, size=None
        )
        terms.add(labels.read_terms(entry.annotations, variant.reference))
        platform = "/".join(variant.platform.split("/")[:2])  # arm64/v8 is arm64 for engines
        by_platform.setdefault(platform, []).append((variant, entry.annotations[labels.CELL]))
    defaults = dict(labels.require_equal_terms(name, terms).defaults)

    answers = []
    for platform, variants in sorted(by_platform.items()):
        published = next((variant for variant, _ in variants if variant.digest in before), None)
        default, why = choose_new_default(variants, named_cells.get(platform), defaults)
        if published and published != default:
            default, why = published, "a version's default stays once it is published"
        answers.append(PlatformDefault(platform=platform, variant=default, why=why))
    return answers


def choose_new_default(
    variants: Sequence[tuple[Variant, str]], named_cell: str | None, defaults: Mapping[str, str]
) -> tuple[Variant | None, str]:
    """Return the default of a version on a platform that has none yet, and why.

    `variants` are those for the platform, each with its cell, and `named_cell` is the cell that the matrix
    names.
    """
    if named_cell:
        variant = next((variant for variant, cell in variants if cell == named_cell), None)
        missing = f"plain_pull names the cell {named_cell}, which is not pushed yet"
        return variant, "plain_pull names it" if variant else missing
    cpu = [variant for variant, _ in variants if not variant.gpu]
    if not cpu:
        return None, "there is no CPU-only variant"

    def make_order_key(variant: Variant) -> tuple[int, int, str]:
        """Return the axes without their default value, then the CPU flags, then the reference."""
        unusual = sum(value != defaults.get(axis, value) for axis, value in variant.axes)
        return unusual, len(variant.cpu_flags), variant.reference

    return min(cpu, key=make_order_key), "the CPU-only variant with the lowest requirements"
