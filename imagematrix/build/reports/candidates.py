"""What Build documents say of the cells that hosts choose from."""

from __future__ import annotations

from imagematrix.build.matrix.promised_variants import Candidates, make_reference
from imagematrix.build.reports.outcome import BUILT
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.reports.outcome import Report
    from imagematrix.images.catalog.catalog import Variant


class KnownCandidates:
    """The candidates of several documents; of those that were built, what their builds found."""

    def __init__(self) -> None:
        self._candidates: dict[tuple[str, str], Candidates] = {}
        self._built: dict[str, Variant] = {}

    def add(self, report: Report) -> Report:
        """Take what a document says, and return it; raise UsageError if it is damaged."""
        built = {
            make_reference(outcome.image, outcome.version, outcome.cell)
            for outcome in report.outcomes
            if outcome.status in BUILT
        }
        for image in report.hosts.list_objects("images") if report.hosts else ():
            catalog = Catalog.from_json(image.get_object_or_empty("catalog").data, f"{report.where}: catalog")
            key = catalog.image, catalog.version
            self._candidates.setdefault(
                key, Candidates(catalog=catalog, plain_pull=image.get_text_map("plain_pull"))
            )
            for variant in catalog.variants:
                if variant.reference in built:
                    self._built[variant.reference] = variant
        return report

    @property
    def candidates(self) -> list[Candidates]:
        """The candidates of each image; raise UsageError if there are none."""
        if not self._candidates:
            raise UsageError(
                "no document says what hosts choose from", remedy="run the builds, or plan --json, with --for"
            )
        return [candidates.with_facts(self._built) for candidates in self._candidates.values()]
