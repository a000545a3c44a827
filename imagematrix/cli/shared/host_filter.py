"""`--for HOSTS` and `--at-most N`: the cells that hosts need, decided again as facts about images come in."""

from __future__ import annotations

import sys

from imagematrix.common.text import shorten_lines, shorten_words
from imagematrix.errors import UnservedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Matrix
    from imagematrix.build.matrix.promised_variants import Candidates
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.selection.fleet.needed_variants import NeededVariants

SHOWN = 20  # reasons listed in a message before "and N more"
NAMED = 4  # hosts listed before "N more"


def load_host_needs(hosts: Sequence[Path] | None, at_most: int | None) -> HostNeeds | None:
    """Return the needs of the hosts in the files, or None without files; raise UsageError."""
    if not hosts:
        if at_most is not None:
            raise UsageError("--at-most needs the hosts to serve", remedy="add --for HOSTS")
        return None
    from imagematrix.selection.fleet.hosts import load_hosts

    return HostNeeds(load_hosts(*hosts, stream=sys.stdin.buffer), at_most)


class HostNeeds:
    """Which candidates hosts need, at most `at_most` of each image.

    `facts` are the variants of images that exist, by reference: they replace what the candidates promise.
    """

    def __init__(self, hosts: Mapping[str, Host], at_most: int | None) -> None:
        self.facts: dict[str, Variant] = {}
        self._hosts = hosts
        self._at_most = at_most
        self._candidates: Sequence[Candidates] = ()
        self._decisions: list[NeededVariants] = []  # one for each of the candidates
        self._ever_needed: set[str] = set()

    def set_candidates(self, candidates: Sequence[Candidates]) -> None:
        """Decide about these candidates from now on."""
        self._candidates = candidates
        self.decide()

    def add_labels(self, image: str, version: str, cell: str, labels: Mapping[str, str]) -> None:
        """Add the facts in the labels of an image, for the next decision."""
        from imagematrix.build.matrix.promised_variants import make_reference
        from imagematrix.images.catalog.labels import read_variant

        reference = make_reference(image, version, cell)
        self.facts[reference] = read_variant(labels, reference=reference, digest=None, size=None)

    def decide(self) -> bool:
        """Decide by all facts; return whether a candidate is needed that never was before."""
        from imagematrix.selection.fleet.needed_variants import find_needed_variants

        decisions = []
        for candidates in self._candidates:
            catalog = candidates.with_facts(self.facts).catalog
            # Plain pulls get an image on every architecture of the hosts.
            always = choose_plain_pulls(self._hosts.values(), catalog, candidates.plain_pull)
            decisions.append(find_needed_variants(self._hosts, catalog, always=always, limit=self._at_most))
        self._decisions = decisions
        before = len(self._ever_needed)
        self._ever_needed |= self.needed_references
        return len(self._ever_needed) > before

    @property
    def needed_references(self) -> frozenset[str]:
        """The references of the candidates that hosts need."""
        return frozenset[str]().union(*(decision.variants for decision in self._decisions))

    def find_unneeded(self, matrix: Matrix, expansion: Expansion) -> dict[tuple[str, str], str]:
        """Return the cells that no host needs or needed, by image and id, each with the nearest host."""
        from imagematrix.build.matrix.promised_variants import list_candidates, make_reference

        self.set_candidates([list_candidates(matrix, expansion, image) for image in matrix.images])
        nearest = {
            reference: host for decision in self._decisions for reference, host in decision.nearest.items()
        }
        unneeded = {}
        for cell in expansion.cells:
            reference = make_reference(cell.image.name, cell.image.version, cell.id)
            if reference in nearest and reference not in self._ever_needed:
                unneeded[cell.image.name, cell.id] = nearest[reference]
        return unneeded

    def find_unserved_error(self) -> UnservedError | None:
        """Return the error that names the hosts that get no image, with their reasons, or None."""
        lines, remedies = [], []
        for candidates, decision in zip(self._candidates, self._decisions, strict=True):
            image = f"{candidates.catalog.image}:{candidates.catalog.version}"
            for group in decision.unserved:
                miss = group.miss
                whys = [f"{rule.rule}: {rule.why}" for rule in miss.relevant] or [miss.why]
                nearest = f" (nearest: {miss.nearest})" if miss.nearest else ""
                hosts = shorten_words(group.hosts, NAMED, more=", {} more")
                lines.append(f"{image}, {hosts}{nearest}: {'; '.join(whys)}")
                remedies += [miss.shown] if miss.shown else []
        if not lines:
            return None
        return UnservedError(
            "hosts get no image:", *shorten_lines(lines, SHOWN), remedy=next(iter(remedies), None)
        )

    def require_built(self, references: Collection[str]) -> None:
        """Raise UnservedError if hosts need a candidate that is not among these references."""
        if not self.needed_references and (unserved := self.find_unserved_error()):
            raise unserved
        missing = sorted(self.needed_references.difference(references))
        if missing:
            raise UnservedError(
                "hosts need images that are not built:",
                *shorten_lines(missing, SHOWN),
                remedy="build them, with the same --for",
            )

    def to_json(self) -> dict[str, object]:
        """Return the part of the Plan and Build documents about the hosts."""
        images = [
            {
                "catalog": candidates.with_facts(self.facts).catalog.to_json(),
                "plain_pull": dict(candidates.plain_pull),
                "needed": sorted(decision.variants),
                "unserved": [group.to_json() for group in decision.unserved],
                "at_most": decision.limited.to_json() if decision.limited else None,
            }
            for candidates, decision in zip(self._candidates, self._decisions, strict=True)
        ]
        return {"hosts": len(self._hosts), "images": images}


def choose_plain_pulls(
    hosts: Iterable[Host], catalog: Catalog, defaults: Mapping[str, str]
) -> frozenset[str]:
    """Return the references that plain pulls get: one for each architecture of the hosts that has variants.

    `defaults` are those, by platform, that the matrix names.
    """
    from imagematrix.build.publish.default_platform import choose_new_default
    from imagematrix.selection.selection_target import Target

    references = set()
    for platform in {Target(host=host, gpus=()).platform for host in hosts}:
        candidates = [
            (variant, variant.reference) for variant in catalog.variants if variant.platform == platform
        ]
        default, _ = choose_new_default(candidates, defaults.get(platform), dict(catalog.defaults))
        references.update([default.reference] if default else [])
    return frozenset(references)
