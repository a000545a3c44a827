"""`--for HOSTS` and `--at-most N`: the cells that hosts need, decided again when more is known of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from imagematrix.errors import UnservedError, UsageError
from imagematrix.text import shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.catalog.catalog import Catalog, Variant
    from imagematrix.fleet.needed import Needed
    from imagematrix.matrix.expand import Expansion
    from imagematrix.matrix.matrix import Cell, Image, Matrix
    from imagematrix.node.host import Host

__all__ = ["Candidates", "HostNeeds", "decided", "needing"]

SHOWN = 20  # reasons listed in a message before "and N more"
NAMED = 4  # hosts listed before "N more"


def needing(hosts: Sequence[Path] | None, at_most: int | None) -> HostNeeds | None:
    """Return what the hosts in the files need, or None without files; raise UsageError."""
    if not hosts:
        if at_most is not None:
            raise UsageError("--at-most needs the hosts to serve", remedy="add --for HOSTS")
        return None
    from imagematrix.fleet.hosts import load_hosts

    return HostNeeds(load_hosts(*hosts, stream=sys.stdin.buffer), at_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The variants of one image that hosts choose from: what is known of each cell's image, or its claim.

    References have no input digest. `plain_pull` are the references, by platform, that the matrix names.
    """

    catalog: Catalog
    plain_pull: Mapping[str, str]


class HostNeeds:
    """The cells of a matrix that hosts need; at most so many for each image, if `at_most` is set."""

    def __init__(self, hosts: Mapping[str, Host], at_most: int | None) -> None:
        self.hosts = hosts
        self.at_most = at_most
        self.facts: dict[str, Variant] = {}  # of images that exist, by reference
        self._candidates: list[Candidates] = []
        self._decided: list[Needed] = []
        self._kept: set[str] = set()  # the references of cells that were needed at some time

    def unneeded(self, matrix: Matrix, expansion: Expansion) -> dict[tuple[str, str], str]:
        """Return the cells that no host needs, by image and id, each with the nearest host."""
        from imagematrix.matrix.feasibility import infeasible
        from imagematrix.planning.claims import name

        feasible = [cell for cell in expansion.cells if not infeasible(cell)]
        self._candidates = [_candidates(matrix, expansion, image, feasible) for image in matrix.images]
        self.decide()
        nearest = {name: host for one in self._decided for name, host in one.nearest.items()}
        unneeded = {}
        for cell in feasible:
            reference = name(cell.image.name, cell.image.version, cell.id)
            if reference not in self._kept:
                unneeded[cell.image.name, cell.id] = nearest[reference]
        return unneeded

    def decide(self) -> bool:
        """Decide by all that is known; return whether a cell is needed that was not before."""
        self._decided = [
            decided(self.hosts, candidates, self.facts, self.at_most) for candidates in self._candidates
        ]
        before = len(self._kept)
        self._kept.update(*(one.variants for one in self._decided))
        return len(self._kept) > before

    def error(self) -> UnservedError | None:
        """Return the error that names the hosts that get no image, with their reasons, or None."""
        return unserved_error(
            (candidates.catalog, one) for candidates, one in zip(self._candidates, self._decided, strict=True)
        )

    def to_json(self) -> dict[str, object]:
        """Return what the Plan and Build documents say of the hosts."""
        images = []
        for candidates, one in zip(self._candidates, self._decided, strict=True):
            catalog = known(candidates.catalog, self.facts)
            images.append(
                {
                    "catalog": catalog.to_json(),
                    "plain_pull": dict(candidates.plain_pull),
                    "needed": sorted(one.variants),
                    "unserved": [some.to_json() for some in one.unserved],
                    "at_most": one.limited.to_json() if one.limited else None,
                }
            )
        return {"hosts": len(self.hosts), "images": images}


def _candidates(matrix: Matrix, expansion: Expansion, image: Image, feasible: Iterable[Cell]) -> Candidates:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.matrix.expand import plain_pull
    from imagematrix.planning.claims import claim, name

    named = plain_pull(matrix, expansion, image)
    return Candidates(
        catalog=Catalog(
            image=image.name,
            version=image.version,
            variants=tuple(claim(cell) for cell in feasible if cell.image.name == image.name),
            prefer=image.prefer,
            defaults=image.defaults,
        ),
        plain_pull={platform: name(image.name, image.version, cell) for platform, cell in named.items()},
    )


def known(catalog: Catalog, facts: Mapping[str, Variant]) -> Catalog:
    """Return a catalog with what is known of existing images in place of claims."""
    from imagematrix.record import replace

    return replace(
        catalog, variants=tuple(facts.get(variant.reference, variant) for variant in catalog.variants)
    )


def decided(
    hosts: Mapping[str, Host],
    candidates: Candidates,
    facts: Mapping[str, Variant],
    at_most: int | None,
) -> Needed:
    """Return which candidates hosts need, with the default of each of their architectures.

    `facts` are known of images that exist, by reference.
    """
    from imagematrix.fleet.needed import needed
    from imagematrix.selection.target import Target
    from imagematrix.stores import plain_pull

    catalog = known(candidates.catalog, facts)
    always = set()
    for platform in {Target(host=host, gpus=()).platform for host in hosts.values()}:
        own = [(one, one.reference) for one in catalog.variants if one.platform == platform]
        named = candidates.plain_pull.get(platform)
        default, _ = plain_pull.default(own, named, dict(catalog.defaults))
        always.update([default.reference] if default else [])
    return needed(hosts, catalog, always=always, limit=at_most)


def unserved_error(every: Iterable[tuple[Catalog, Needed]]) -> UnservedError | None:
    """Return the error that names the hosts that get no image, by image, with their reasons; or None."""
    lines, remedies = [], []
    for catalog, one in every:
        for some in one.unserved:
            miss = some.miss
            whys = [f"{rule.rule}: {rule.why}" for rule in miss.relevant] or [miss.why]
            nearest = f" (nearest: {miss.nearest})" if miss.nearest else ""
            hosts = shortened(some.hosts, NAMED, more=", {} more")
            lines.append(f"{catalog.image}:{catalog.version}, {hosts}{nearest}: {'; '.join(whys)}")
            remedies += [miss.fix] if miss.fix else []
    if not lines:
        return None
    shown = shortened(lines, SHOWN, "\n  ", "\n  and {} more")
    return UnservedError(f"hosts get no image:\n  {shown}", remedy=next(iter(remedies), None))
