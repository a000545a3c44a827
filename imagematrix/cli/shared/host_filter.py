"""`--for HOSTS` and `--at-most N`: the cells that hosts need, decided again when more is known of them."""

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
    """Return what the hosts in the files need, or None without files; raise UsageError."""
    if not hosts:
        if at_most is not None:
            raise UsageError("--at-most needs the hosts to serve", remedy="add --for HOSTS")
        return None
    from imagematrix.selection.fleet.hosts import load_hosts

    return HostNeeds(load_hosts(*hosts, stream=sys.stdin.buffer), at_most)


class HostNeeds:
    """What hosts need of candidates; at most so many of each image, if `at_most` is set.

    `facts` are what is known of images that exist, by reference: they replace what the candidates promise.
    """

    def __init__(self, hosts: Mapping[str, Host], at_most: int | None) -> None:
        self.facts: dict[str, Variant] = {}
        self._hosts = hosts
        self._at_most = at_most
        self._candidates: Sequence[Candidates] = ()
        self._decided: list[NeededVariants] = []
        self._kept: set[str] = set()

    def consider(self, candidates: Sequence[Candidates]) -> None:
        """Decide about these candidates from now on."""
        self._candidates = candidates
        self.decide()

    def add_labels(self, image: str, version: str, cell: str, labels: Mapping[str, str]) -> None:
        """Take what the labels of an image say; it plays a part in the next decision."""
        from imagematrix.build.matrix.promised_variants import make_reference
        from imagematrix.images.catalog.labels import read_variant

        reference = make_reference(image, version, cell)
        self.facts[reference] = read_variant(labels, reference=reference, digest=None, size=None)

    def decide(self) -> bool:
        """Decide by all that is known; return whether something is needed that never was before."""
        self._decided = [self._find_needed(one) for one in self._candidates]
        before = len(self._kept)
        self._kept |= self.needed
        return len(self._kept) > before

    @property
    def needed(self) -> frozenset[str]:
        """The references of the candidates that are needed."""
        return frozenset[str]().union(*(one.variants for one in self._decided))

    def find_unneeded(self, matrix: Matrix, expansion: Expansion) -> dict[tuple[str, str], str]:
        """Return the cells that no host needs or needed, by image and id, each with the nearest host."""
        from imagematrix.build.matrix.promised_variants import list_candidates, make_reference

        self.consider([list_candidates(matrix, expansion, image) for image in matrix.images])
        nearest = {reference: host for one in self._decided for reference, host in one.nearest.items()}
        found = {}
        for cell in expansion.cells:
            reference = make_reference(cell.image.name, cell.image.version, cell.id)
            if reference in nearest and reference not in self._kept:
                found[cell.image.name, cell.id] = nearest[reference]
        return found

    def error(self) -> UnservedError | None:
        """Return the error that names the hosts that get no image, with their reasons, or None."""
        lines, remedies = [], []
        for candidates, one in zip(self._candidates, self._decided, strict=True):
            image = f"{candidates.catalog.image}:{candidates.catalog.version}"
            for some in one.unserved:
                miss = some.miss
                whys = [f"{rule.rule}: {rule.why}" for rule in miss.relevant] or [miss.why]
                nearest = f" (nearest: {miss.nearest})" if miss.nearest else ""
                hosts = shorten_words(some.hosts, NAMED, more=", {} more")
                lines.append(f"{image}, {hosts}{nearest}: {'; '.join(whys)}")
                remedies += [miss.shown] if miss.shown else []
        if not lines:
            return None
        return UnservedError(
            "hosts get no image:", *shorten_lines(lines, SHOWN), remedy=next(iter(remedies), None)
        )

    def require(self, existing: Collection[str]) -> None:
        """Raise UnservedError if something is needed that is not among the `existing` references."""
        if not self.needed and (unserved := self.error()):
            raise unserved
        missing = sorted(self.needed.difference(existing))
        if missing:
            raise UnservedError(
                "hosts need images that are not built:",
                *shorten_lines(missing, SHOWN),
                remedy="build them, with the same --for",
            )

    def to_json(self) -> dict[str, object]:
        """Return what the Plan and Build documents say of the hosts."""
        images = [
            {
                "catalog": candidates.with_facts(self.facts).catalog.to_json(),
                "plain_pull": dict(candidates.plain_pull),
                "needed": sorted(one.variants),
                "unserved": [some.to_json() for some in one.unserved],
                "at_most": one.limited.to_json() if one.limited else None,
            }
            for candidates, one in zip(self._candidates, self._decided, strict=True)
        ]
        return {"hosts": len(self._hosts), "images": images}

    def _find_needed(self, candidates: Candidates) -> NeededVariants:
        """Return which candidates hosts need, with the default of each of their architectures."""
        from imagematrix.selection.fleet.needed_variants import find_needed_variants

        catalog = candidates.with_facts(self.facts).catalog
        always = choose_plain_pulls(self._hosts.values(), catalog, candidates.plain_pull)
        return find_needed_variants(self._hosts, catalog, always=always, limit=self._at_most)


def choose_plain_pulls(hosts: Iterable[Host], catalog: Catalog, named: Mapping[str, str]) -> frozenset[str]:
    """Return the variants for plain pulls, by reference: one for each architecture of the hosts that has one.

    `named` are those, by platform, that the matrix names.
    """
    from imagematrix.build.publish.default_platform import choose_new_default
    from imagematrix.selection.selection_target import Target

    found = set()
    for platform in {Target(host=host, gpus=()).platform for host in hosts}:
        own = [(one, one.reference) for one in catalog.variants if one.platform == platform]
        variant, _ = choose_new_default(own, named.get(platform), dict(catalog.defaults))
        found.update([variant.reference] if variant else [])
    return frozenset(found)
