"""Cells to Dockerfiles, with jinja2: an unknown variable is an error, and so is a value that is none."""

from __future__ import annotations

import jinja2
import jinja2.sandbox

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.facts import device_code
from imagematrix.matrix.feasibility import ARCHES
from imagematrix.matrix.problems import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from pathlib import Path
    from typing import Any

    from imagematrix.matrix.matrix import Cell

__all__ = ["Renderer", "variables"]


class Renderer:
    """Renders the templates of one folder; a template is compiled once for all its cells.

    Templates come with the matrix, perhaps from a pull request, so they run in jinja's sandbox: rendering
    can't touch this machine.
    """

    def __init__(self, templates: Path) -> None:
        self._environment = _Environment(
            loader=jinja2.FileSystemLoader(templates),
            undefined=jinja2.StrictUndefined,
            finalize=_present,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
        )
        self._folder = templates

    def render(self, cell: Cell, images: Mapping[str, str]) -> str:
        """Return the Dockerfile of `cell`; raise UsageError naming template and line.

        `images` are the references of the other images of the same cell, by name.
        """
        name = cell.image.template
        try:
            return self._environment.get_template(name).render(variables(cell), images=images)
        except ImagematrixError:  # of an image that this one builds on
            raise
        except jinja2.TemplateNotFound as error:
            raise UsageError(f"{self._folder / name}: no template {error.name!r}") from error
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self._folder / name}:{error.lineno}"
            raise UsageError(f"{where}: {error.message}") from error
        except Exception as error:  # what a template does with filters can end in any of Python's errors
            raise self._error(cell, error) from error

    def _error(self, cell: Cell, error: Exception) -> UsageError:
        where = self._where(error, cell.image.template)
        message = f"{where}: {error} (in the cell {cell.id})"
        known = variables(cell)
        words = str(error).split("'")
        unknown = words[1] if isinstance(error, jinja2.UndefinedError) and len(words) > 1 else None
        remedy = nearest(unknown, known) if unknown else None
        return UsageError(message, remedy=remedy or f"templates see {', '.join(sorted(known))}")

    def _where(self, error: Exception, name: str) -> str:
        """Return file and line of the innermost template frame."""
        place = str(self._folder / name)
        trace = error.__traceback__
        while trace:
            file = trace.tb_frame.f_code.co_filename
            if file.startswith(str(self._folder)):
                place = f"{file}:{trace.tb_lineno}"
            trace = trace.tb_next
        return place


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where a template's globals are a plain dictionary.

    Jinja copies them for every rendering, and to copy its own ChainMap takes a quarter of all the time.
    """

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _NoneValueError(Exception):
    """A value that is none in this cell was about to be written."""


def _present(value: object) -> object:
    if value is None:
        raise _NoneValueError("a value that is none here would be written; ask for it with {% if %} first")
    return value


def variables(cell: Cell) -> dict[str, object]:
    """Return what a template sees of `cell`.

    Every axis by its name (None where it means nothing in this cell), the properties of the cell's values,
    `sm` (the compute capability as targets write it), `arch` (as uname says it), `march_option` (how the
    compiler wants the march), `image` and `version`.
    """
    compute, march = cell.axes.get("compute"), cell.axes.get("march")
    return {
        "image": cell.image.name,
        "version": cell.image.version,
        "compute": None,
        "driver": None,
        "march": None,
        **cell.axes,
        **cell.properties,
        "cuda": cell.cuda,
        "platform": cell.platform,
        "arch": ARCHES[cell.platform],
        "sm": device_code.target(compute) if compute else None,
        "march_option": cell.facts.option(march) if march else None,
    }
