"""The builds of one command: first those of its plan, then those that hosts turn out to need."""

from __future__ import annotations

from dataclasses import replace

from imagematrix.build.executor.result import combine_failures, complete_results
from imagematrix.build.plan.plan import PlanStatus
from imagematrix.cli.shared.build_session import warn_of_lost
from imagematrix.cli.shared.output import print_info
from imagematrix.cli.shared.progress import show_progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from imagematrix.build.executor.result import Result
    from imagematrix.build.plan.plan import Plan, Planned
    from imagematrix.cli.shared.host_filter import HostNeeds
    from imagematrix.cli.shared.progress import Progress


class RebuildLoop:
    """The plan of a build, and the results so far, also if the build is interrupted.

    With `needs`, the facts of the built images decide again which cells the hosts need. With `adds`, those
    that are then missing are built, too. `progress_kind` is one of progress.KINDS.
    """

    def __init__(self, plan: Plan, needs: HostNeeds | None, *, adds: bool, progress_kind: str) -> None:
        self.plan = plan
        self._needs = needs
        self._adds = adds
        self._progress_kind = progress_kind
        self._todo: list[Planned] = []
        self._results: list[Result] = []  # of the finished rounds
        self._reporter: Progress | None = None

    @property
    def results(self) -> list[Result]:
        """The results of all cells that were to be built."""
        return complete_results(
            self._todo, [*self._results, *(self._reporter.results if self._reporter else ())]
        )

    def run(
        self,
        make_plan: Callable[[], Plan],
        build: Callable[[Plan, Progress], object],
        *,
        verify: bool,
        is_due: Callable[[Planned], bool],
    ) -> None:
        """Plan and build until hosts need nothing more, or something failed.

        An image that is up to date is built again to `verify` it, and tested again if it `is_due`.
        """
        verified = [PlanStatus.UP_TO_DATE] if verify else []
        while True:
            self.plan, rest = _split_plan(make_plan(), self._results)
            warn_of_lost(self.plan)
            todo = rest.with_status(PlanStatus.BUILD, PlanStatus.ADOPT, PlanStatus.FAILED, *verified)
            if not verify:
                todo += tuple(filter(is_due, rest.with_status(PlanStatus.UP_TO_DATE)))
            self._todo += todo
            with show_progress(todo, self._progress_kind) as self._reporter:
                # Builders are looked up only if there is something to build.
                if todo or rest.with_status(PlanStatus.REFUSED):
                    build(rest, self._reporter)
            self._results += self._reporter.results
            self._reporter = None
            if not self._needs:
                return
            for item, labels in _list_labels(self.plan, self._results):
                self._needs.add_labels(item.cell.image.name, item.cell.image.version, item.cell.id, labels)
            needs_more = self._adds and self._needs.decide()
            self.plan = replace(self.plan, hosts=self._needs.to_json())
            if not needs_more or combine_failures(self._results):
                return
            print_info("by what the images contain, hosts need more cells")


def _split_plan(plan: Plan, results: Sequence[Result]) -> tuple[Plan, Plan]:
    """Return a plan with the items of the results in place of its own, and a plan without these items."""
    items = {(result.item.cell.image.name, result.item.cell.id): result.item for result in results}
    whole = [items.get((item.cell.image.name, item.cell.id), item) for item in plan.items]
    rest = [item for item in plan.items if (item.cell.image.name, item.cell.id) not in items]
    return replace(plan, items=tuple(whole)), replace(plan, items=tuple(rest))


def _list_labels(plan: Plan, results: Sequence[Result]) -> Iterator[tuple[Planned, Mapping[str, str]]]:
    """Yield the cells whose images exist, with the images' labels."""
    for item in plan.with_status(PlanStatus.UP_TO_DATE):
        yield item, item.labels
    for result in results:
        if result.is_stored:
            yield result.item, result.labels or result.item.labels
