"""The classes of nodes in a cluster, and the image that each class gets from a catalog.

Nodes of one class have the same facts, as far as labels show them: every selection treats them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from imagematrix.common.groups import group_values
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.labels import CARRIED, CLASS
from imagematrix.selection.fleet.hardware_kinds import get_miss, group_by_hardware
from imagematrix.selection.fleet.upgrade import compute_upgrades
from imagematrix.selection.query import normalize_where
from imagematrix.selection.rules import RULES
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.selection.fleet.hardware_kinds import HardwareKind
    from imagematrix.selection.fleet.upgrade import Upgrade
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.query import Where

SCHEMA = "imagematrix.classes/v1"
STALE = "a node's label imagematrix.io/class does not match its other labels: label it again"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeClass:
    """A class: its name, its nodes sorted by name, and the `kind` of hardware with the catalog's answer.

    `strays` are nodes that have the class label with its name, but other facts.
    """

    name: str
    nodes: tuple[ClusterNode, ...]
    kind: HardwareKind
    strays: tuple[ClusterNode, ...] = ()

    @property
    def placeable_nodes(self) -> tuple[ClusterNode, ...]:
        """Its nodes without those that have the class label of another class."""
        return tuple(node for node in self.nodes if self.has_label(node) or CLASS not in node.labels)

    @property
    def is_labelled(self) -> bool:
        """Whether all nodes of the class have the class label with its name."""
        return all(map(self.has_label, self.nodes))

    def has_label(self, node: ClusterNode) -> bool:
        """Whether a node has the class label with the name of this class."""
        return node.labels.get(CLASS) == self.name

    @property
    def variant(self) -> Variant | None:
        """The variant that its nodes get, or None if nothing fits."""
        return self.kind.variant

    @property
    def miss(self) -> Miss | None:
        """Why nothing fits, or None if something does."""
        return get_miss(self.kind.answer)

    @property
    def why(self) -> str:
        """Why its nodes get their variant, or why nothing fits."""
        first_miss = self.miss
        if first_miss is not None:
            return first_miss.why
        count = len(self.kind.fits)
        return "the only one that fits" if count == 1 else f"the best of {count} that fit"

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of its nodes, without duplicates."""
        warnings = (warning for node in self.nodes for warning in node.host.warnings)
        # Nodes without labels of ours have no class label that could be wrong.
        stale = [] if self.is_labelled or not any(node.has_our_labels for node in self.nodes) else [STALE]
        return (*dict.fromkeys(warnings), *stale)

    def to_json(self) -> dict[str, object]:
        """Return one element of the Classes document's `classes`."""
        sample = self.kind.sample
        variant = self.variant
        return {
            "name": self.name,
            "nodes": [node.name for node in self.nodes],
            "gpus": self.kind.gpus,
            "driver": sample.driver.version if sample.driver else None,
            "level": self.kind.level,
            "selected": variant.reference if variant else None,
            "digest": variant.digest if variant else None,
            "why": self.why,
            "fits": sorted(self.kind.fits),
            "miss": self.miss.to_json() if self.miss else None,
            "labelled": self.is_labelled,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """The classes of a cluster, most nodes first, and what driver upgrades would change.

    `catalog` contains only the variants that the question admits.
    """

    catalog: Catalog
    classes: tuple[NodeClass, ...]
    upgrades: tuple[Upgrade, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every class gets an image, and keeps one through every upgrade."""
        if not all(node_class.variant for node_class in self.classes):
            return False
        return not any(upgrade.lost for upgrade in self.upgrades)

    def to_json(self) -> dict[str, object]:
        """Return the Classes document."""
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "classes": [node_class.to_json() for node_class in self.classes],
            "upgrades": [upgrade.to_json() for upgrade in self.upgrades],
        }


def classify_nodes(
    nodes: Iterable[ClusterNode],
    catalog: Catalog,
    *,
    gpus: str | None = None,
    allow_cpu: bool = False,
    drivers: Mapping[str, str] | None = None,
    where: Where | None = None,
) -> Classes:
    """Return the classes of `nodes`, each with its answer from `catalog`.

    `gpus`, `allow_cpu` and `where` are as for `select`; `drivers` maps each driver to be upgraded to its new
    version. Raises UsageError if `where` leaves one of the image's own axes open.
    """
    selector = Selector(catalog, normalize_where(where))
    _require_labelled_facts(selector.query.catalog)
    explain_host = partial(selector.explain_or_refuse, gpus=gpus, allow_cpu=allow_cpu)
    by_name = {node.name: node for node in nodes}
    kinds = group_by_hardware({name: node.host for name, node in by_name.items()}, explain_host)
    for kind in kinds:
        kind.require_unambiguous()
    return Classes(
        catalog=selector.query.catalog,
        classes=_make_classes(kinds, by_name),
        upgrades=compute_upgrades(kinds, explain_host, drivers or {}),
    )


def _require_labelled_facts(catalog: Catalog) -> None:
    """Raise UsageError if a rule reads a fact that labels do not have."""
    lacking = [(rule, missing) for rule in RULES if (missing := {*rule.facts} - CARRIED)]
    for rule, missing in lacking:
        for variant in catalog.variants:
            if rule.need(variant) is not None:
                name = f"{catalog.image}:{catalog.version}"
                lack = f"{', '.join(sorted(missing))}, which labels of nodes do not have"
                raise UsageError(
                    f"{variant.reference}: the rule {rule.name} reads {lack}",
                    remedy="leave this variant out with --where, or let its node choose: "
                    f"`imagematrix run {quote_word(name)}`",
                )


def _make_classes(kinds: Iterable[HardwareKind], nodes: Mapping[str, ClusterNode]) -> tuple[NodeClass, ...]:
    """Return the kinds as classes: kinds that differ only in the order of their GPUs share a class."""
    by_name: dict[str, tuple[HardwareKind, list[str]]] = {}
    for kind in kinds:
        # The name follows from the facts, so that a node can state its class without knowing the others.
        by_name.setdefault(nodes[kind.hosts[0]].class_name, (kind, []))[1].extend(kind.hosts)
    by_label = group_values((nodes[name].labels.get(CLASS, ""), nodes[name]) for name in sorted(nodes))
    class_names = {host: name for name, (_, hosts) in by_name.items() for host in hosts}
    classes = [
        NodeClass(
            name=name,
            nodes=tuple(nodes[host] for host in sorted(hosts)),
            kind=kind,
            strays=tuple(node for node in by_label.get(name, ()) if class_names[node.name] != name),
        )
        for name, (kind, hosts) in by_name.items()
    ]
    return tuple(sorted(classes, key=lambda node_class: (-len(node_class.nodes), node_class.name)))
