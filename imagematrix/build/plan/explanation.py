"""Why one cell is built, or is not: what each step of its plan decided, and from what."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from difflib import unified_diff

from imagematrix.build.matrix.promised_variants import promise_variant
from imagematrix.build.matrix.value_sources import list_value_sources
from imagematrix.build.plan.identity import TRIM, Identity
from imagematrix.build.plan.lock import locate_lock, read_base_digests
from imagematrix.build.plan.plan import Planned
from imagematrix.build.plan.remote_driver import RemoteDriver
from imagematrix.errors import UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import UNKNOWN
from imagematrix.images.oci.manifest import compute_digest
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from imagematrix.build.matrix.matrix import Matrix
    from imagematrix.build.matrix.value_sources import ValueSource
    from imagematrix.build.plan.driver import DriverFolder
    from imagematrix.build.plan.plan import Dropped, Plan

SCHEMA = "imagematrix.cell/v1"
SOURCES = {"schema": None, "epoch": None, TRIM: None, "proxy": "--proxy"}  # None: a release of imagematrix
RESOLVED = "the engine or its registry"  # of bases that no lock has
SIBLING = "another image of the matrix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One component of a cell's identity: its value, that of the existing image, and where it comes from.

    A value is None if the cell or the image has no such component, `before` also if there is no image. The
    source is None if only a release of imagematrix changes it, or if there is no context.
    """

    name: str
    value: str | None
    before: str | None
    source: str | None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Cell document's `inputs`."""
        return {"name": self.name, "value": self.value, "before": self.before, "from": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleNeed:
    """What a cell's image needs of a node, by the fields of its catalog entry that one `rule` compares.

    `source` is where that is known from, as in the results of the rule.
    """

    rule: str
    fields: Mapping[str, object]
    source: str

    def to_json(self) -> dict[str, object]:
        """Return one element of the Cell document's `needs`."""
        return {"rule": self.rule, "fields": dict(self.fields), "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildMethod:
    """How the engine builds: into OCI `layouts` or its classic store; `error` is why it cannot, or None."""

    layouts: bool = False
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return `method` of the Cell document."""
        return {"layouts": self.layouts, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellExplanation:
    """What was decided about the cell of `item`.

    `values` are where its values stand in the matrix. `existing` is the reference of the image that its
    `inputs` were compared with, or None. There are no inputs as long as the digests of the images `unknown`
    are. If `doubtful`, the labels of the existing image contradict each other: from what it was built, they
    do not tell. `lines` are those of the Dockerfile that differ, each after - or +, if the earlier Dockerfile
    is known. `needs` are those that the image of the same inputs states, or else those that the cell
    promises. `method` is None if nothing is to be built.
    """

    item: Planned | Dropped
    values: tuple[ValueSource, ...]
    existing: str | None = None
    inputs: tuple[Input, ...] = ()
    unknown: tuple[str, ...] = ()
    doubtful: bool = False
    lines: tuple[str, ...] = ()
    needs: tuple[RuleNeed, ...] = ()
    method: BuildMethod | None = None

    def to_json(self) -> dict[str, object]:
        """Return the Cell document."""
        return {
            "schema": SCHEMA,
            "cell": self.item.to_json(),
            "values": [value.to_json() for value in self.values],
            "existing": self.existing,
            "doubtful": self.doubtful,
            "inputs": [component.to_json() for component in self.inputs],
            "unknown": list(self.unknown),
            "lines": list(self.lines),
            "needs": [need.to_json() for need in self.needs],
            "method": self.method.to_json() if self.method else None,
        }


def explain_cell(
    matrix: Matrix, plan: Plan, item: Planned | Dropped, recorded: str | None = None
) -> CellExplanation:
    """Return what `plan`, a plan of `matrix`, decided about one of its items; raise UsageError.

    `recorded` is a Dockerfile of the cell that may be that of the existing image.
    """
    values = list_value_sources(matrix, item.cell)
    if not isinstance(item, Planned):
        return CellExplanation(item=item, values=values)
    needs = tuple(_list_needs(item))
    if item.identity is None:
        unknown = tuple(_list_unknown(plan, item))
        return CellExplanation(item=item, values=values, unknown=unknown, needs=needs)
    existing, before, digest = _find_existing(item)
    components = item.identity.components
    sources = dict.fromkeys(components, str(matrix.path)) | _list_sources(matrix, plan, item)
    inputs = [
        Input(name=name, value=components.get(name), before=before.get(name), source=sources.get(name))
        for name in dict.fromkeys((*components, *before))
    ]
    return CellExplanation(
        item=item,
        values=values,
        existing=existing,
        inputs=tuple(inputs),
        doubtful=existing is not None and Identity(components=before).digest != digest,
        lines=_list_changed_lines(recorded or "", before.get("dockerfile"), item.dockerfile),
        needs=needs,
    )


def _find_existing(item: Planned) -> tuple[str | None, Mapping[str, str], str | None]:
    """Return the image that an item was compared with, and its components and input digest, as it states."""
    if item.difference:
        existing = item.difference.existing
        return existing.reference, item.difference.before, existing.input_digest
    if item.labels:
        return item.reference, labels.read_components(item.labels) or {}, item.labels.get(labels.INPUT)
    return None, {}, None


def _list_changed_lines(recorded: str, digest: str | None, dockerfile: str) -> tuple[str, ...]:
    """Return the lines that differ from the Dockerfile with a digest; none if `recorded` is another one."""
    if compute_digest(recorded.encode()) != digest:
        return ()
    lines = [*unified_diff(recorded.splitlines(), dockerfile.splitlines(), n=0, lineterm="")]
    return tuple(line for line in lines[2:] if not line.startswith("@@"))


def _list_needs(item: Planned) -> Iterator[RuleNeed]:
    """Yield what rules compare of an item's image; labels that cannot be read prove nothing."""
    variant = promise_variant(item.cell)
    if labels.VARIANT in item.labels:
        with contextlib.suppress(UsageError):
            variant = labels.read_variant(item.labels, reference=item.reference, digest=None, size=None)
    entry = variant.to_json()
    for rule in RULES:
        fields = {part: entry[part] for part in rule.parts if entry.get(part)}
        source = variant.source(rule.fact)
        if rule.may_apply(variant) and (fields or source == UNKNOWN):
            yield RuleNeed(rule=rule.name, fields=fields, source=source)


def _list_unknown(plan: Plan, item: Planned) -> Iterator[str]:
    """Yield the images without a known digest that an item is built on."""
    yield from (name for name in item.bases if name not in plan.bases)
    # The reference of an image of this matrix ends with its input digest, unless that is unknown.
    yield from (name for name in item.needs if name.endswith(f"-{item.cell.id}"))


def _list_sources(matrix: Matrix, plan: Plan, item: Planned) -> dict[str, str | None]:
    """Return where components of an item's identity come from, by name; all others are keys of the matrix."""
    image, its_driver = item.cell.image, item.driver
    lock = locate_lock(matrix.path)
    locked = read_base_digests(lock)
    found = {name: str(lock) if name in locked else RESOLVED for name in item.bases}
    return {
        **SOURCES,
        "dockerfile": str(matrix.templates / image.template),
        "context": str(image.context) if image.context else None,
        **({"platform": None} if "platform" not in item.cell.axes else {}),
        **{f"arg {name}": "--build-arg" for name in plan.build_inputs.args},
        **{f"base {name}": source for name, source in found.items()},
        **{f"base {name}": SIBLING for name in item.needs},
        **({"driver": str(_get_driver_source(its_driver))} if its_driver else {}),
    }


def _get_driver_source(its_driver: DriverFolder | RemoteDriver) -> Path | str:
    return its_driver.address if isinstance(its_driver, RemoteDriver) else its_driver.source
