"""The Gang: several hosts with the variants that they run together, or with the reasons why they cannot."""

from __future__ import annotations

from imagematrix.common.groups import group_values
from imagematrix.common.record import Record
from imagematrix.common.text import shorten_lines, shorten_words
from imagematrix.errors import UnservedError
from imagematrix.hardware.gpu_request.spec import name_gpus
from imagematrix.selection.decision import Decision
from imagematrix.selection.query import Query
from imagematrix.selection.rule import select_relevant
from imagematrix.selection.selection import Selection
from imagematrix.selection.selection_target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.selection.rule import RuleResult, RuleWarning

SCHEMA = "imagematrix.gang/v1"
SHOWN = 20  # reasons in a message
NAMED = 4  # hosts that a reason names


class GangMember(Record):
    """A host of a gang, by its name, with its variant and the GPUs to pass."""

    name: str
    host: Host
    variant: Variant
    chosen_gpus: tuple[Gpu, ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        """A name for each GPU or MIG device passed: its UUID, or its index if the UUID is unknown."""
        return name_gpus(self.chosen_gpus)

    @property
    def pinned(self) -> str:
        """The reference of the variant with its digest, if it has one."""
        digest = self.variant.digest
        return f"{self.variant.reference}@{digest}" if digest else self.variant.reference

    def to_json(self) -> dict[str, object]:
        """Return one element of the document's `members`."""
        return {
            "name": self.name,
            "selected": self.variant.reference,
            "digest": self.variant.digest,
            "gpus": list(self.gpus),
        }


class ExcludedHosts(Record):
    """Hosts that the largest gang leaves out for one reason.

    `rules` are those that the nearest of its variants fails, which is named by its reference; None if the
    catalog has no variants.
    """

    hosts: tuple[str, ...]
    nearest: str | None
    rules: tuple[RuleResult, ...]

    def __str__(self) -> str:
        hosts = shorten_words(self.hosts, NAMED, more=" and {} more")
        by_why = group_values((rule.why, rule.rule) for rule in select_relevant(self.rules))
        whys = [f"{', '.join(failed)}: {why}" for why, failed in by_why.items()]
        return f"{hosts}: {'; '.join(whys) or 'no variants'}"

    def to_json(self) -> dict[str, object]:
        """Return one element of the document's `left`."""
        rules = [
            {"rule": rule.rule, "need": rule.need, "have": rule.have, "why": rule.why} for rule in self.rules
        ]
        return {"hosts": list(self.hosts), "nearest": self.nearest, "rules": rules}


class Gang(Record):
    """The answer for several hosts, sorted by their names.

    `alike` are the libraries of which their variants must have the same versions, None for one variant on all
    hosts. If nothing fits all hosts, the members are the largest set that one variant serves, or variants
    that are alike do, and `left` has the others. `unknown` says of how many variants the version of such a
    library is unknown. `warnings` are about a complete gang: that its values are not the first defaults.
    """

    catalog: Catalog
    alike: tuple[str, ...] | None
    members: tuple[GangMember, ...]
    left: tuple[ExcludedHosts, ...] = ()
    unknown: tuple[tuple[str, int], ...] = ()
    warnings: tuple[RuleWarning, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all hosts are members."""
        return not self.left

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that the members run, sorted by reference."""
        by_reference = {member.variant.reference: member.variant for member in self.members}
        return tuple([by_reference[reference] for reference in sorted(by_reference)])

    @property
    def by_name(self) -> Mapping[str, GangMember]:
        """The members by their names."""
        return {member.name: member for member in self.members}

    def selection(self, name: str) -> Selection:
        """Return the Selection of the member of this name, as for `launch`: it has no other candidates.

        Nor has it warm images: all members start variants.
        """
        member = self.by_name[name]
        catalog = self.catalog.without_warm().named(member.variant.reference)
        assert catalog is not None  # noqa: S101 - the variant is from it; for the type checker
        target = Target(host=member.host, gpus=member.chosen_gpus, allow_cpu=True)
        decision = Decision(Query(catalog, ()), target)
        return Selection(host=member.host, chosen_gpus=member.chosen_gpus, decision=decision)

    def to_json(self) -> dict[str, object]:
        """Return the Gang document."""
        variant = self.variants[0] if self.complete and self.alike is None else None
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "alike": None if self.alike is None else list(self.alike),
            "complete": self.complete,
            "selected": variant.reference if variant else None,
            "digest": variant.digest if variant else None,
            "members": [member.to_json() for member in self.members],
            "left": [excluded.to_json() for excluded in self.left],
            "unknown": dict(self.unknown),
            **({"warnings": [warning.to_json() for warning in self.warnings]} if self.warnings else {}),
        }


class NothingFitsAll(UnservedError):  # noqa: N818 - named as NothingFits
    """No variant fits all hosts of a gang, nor do variants that are alike.

    `gang` is the largest set of hosts that works, and why the others do not.
    """

    def __init__(self, message: str, *, gang: Gang, remedy: str, shown: str | None = None) -> None:
        lines = shorten_lines([*map(str, gang.left)], SHOWN)
        super().__init__(f"{message}:" if lines else message, *lines, remedy=remedy, shown=shown)
        self.gang = gang
