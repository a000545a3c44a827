"""The step of a plan that renders cells to Dockerfiles, and finds the faults in these."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

from imagematrix.build.dockerfile import dockerfile as dockerfiles
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.build.dockerfile.render import complete_dockerfile
from imagematrix.build.dockerfile.template_error import TemplateError, locate_faults
from imagematrix.build.plan import driver, flags
from imagematrix.build.plan.plan import Planned, PlanStatus, get_full_name
from imagematrix.build.trim import program
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from imagematrix.build.dockerfile.instructions import Fault
    from imagematrix.build.dockerfile.render import Renderer
    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.context_files import ContextFiles

CONTEXTS = frozenset((program.CONTEXT, driver.CONTEXT))


@dataclass(frozen=True, slots=True)
class RenderedCell:
    """A cell with its Dockerfile, planned as to build; `error` is why it cannot be.

    `images` are the images that the Dockerfile names, `contexts` the other contexts. `needs` are the images
    of this matrix that its template looked up, so that it may build on them, by reference.
    """

    item: Planned
    images: tuple[str, ...]
    contexts: frozenset[str]
    needs: Mapping[str, Planned]
    error: UsageError | None


class CellRenderer:
    """Renders cells with `renderer`; `errors` are those of their Dockerfiles, by image and cell.

    `arguments` are build arguments. `find_files` returns the files of a context, and `plan_image` the plan of
    another image for the same cell, by its name.
    """

    def __init__(
        self,
        renderer: Renderer,
        arguments: Mapping[str, str],
        find_files: Callable[[Path | None], ContextFiles],
        plan_image: Callable[[Cell, str], Planned],
    ) -> None:
        self.errors: dict[str, TemplateError] = {}
        self._renderer = renderer
        self._arguments = arguments
        self._find_files = find_files
        self._plan_image = plan_image

    def render_cell(self, cell: Cell) -> RenderedCell:
        """Render a cell; raise TemplateError, and keep it, if its Dockerfile has faults."""
        rendering = self._renderer.render(cell, partial(self._look_up, cell))
        cause: DockerfileError | None = None
        try:
            text = complete_dockerfile(rendering.text, cell, self._arguments)
            images = dockerfiles.list_bases(text)
            faults = self._find_missing_sources(cell, text) if cell.image.context is None else []
        except DockerfileError as error:
            cause, text, images = error, error.dockerfile, ()
            faults = [*error.faults, *dockerfiles.find_faults(text)]
            with contextlib.suppress(UsageError):  # of a context that cannot be read
                faults += self._find_missing_sources(cell, text)
        if faults:
            located = self._locate_faults(cell, rendering.text, text, faults)
            self.errors[get_full_name(cell)] = located
            raise located from cause
        needs = {reference: self._plan_image(cell, name) for name, reference in rendering.images.items()}
        contexts = CONTEXTS.intersection(images)
        names = tuple(name for name in images if name not in contexts)
        item = Planned(
            cell=cell,
            status=PlanStatus.BUILD,
            # Without the digests of bases, the input digest is unknown.
            reference=f"{cell.image.name}:{cell.image.version}-{cell.id}",
            dockerfile=text,
            bases=tuple(name for name in names if name not in needs),
            needs=tuple(name for name in names if name in needs),
        )
        source_error = self._find_source_error(cell, rendering.text, text)
        return RenderedCell(item, names, contexts, needs, source_error)

    def _find_source_error(self, cell: Cell, template_output: str, text: str) -> UsageError | None:
        """Return the error if a build would not find a file, or nobody knows the flags of a march."""
        try:
            flags.require_flag_source(cell, text)
            missing = self._find_missing_sources(cell, text)
            return self._locate_faults(cell, template_output, text, missing) if missing else None
        except UsageError as error:
            return error

    def _find_missing_sources(self, cell: Cell, text: str) -> list[Fault]:
        """Return the faults of paths that a Dockerfile copies; raise UsageError for an unreadable context."""
        files = self._find_files(cell.image.context)
        return dockerfiles.find_missing_sources(
            text, files.find_complaint, [flags.STAGE] if "march" in cell.axes else []
        )

    def _locate_faults(
        self, cell: Cell, template_output: str, text: str, faults: Iterable[Fault]
    ) -> TemplateError:
        """Return the error for faults of a Dockerfile, which was completed from its template's output."""
        origins = self._renderer.find_origins(cell, partial(self._look_up, cell), template_output)
        folder = self._renderer.folder
        return locate_faults(dict.fromkeys(faults), text, cell.image.template, folder, origins)

    def _look_up(self, cell: Cell, name: str) -> str:
        return self._plan_image(cell, name).reference
